"""A tiny model, packed batches and the production step, for tests of train/."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from model.config import ModelConfig, Moe, Rope
from model.execution import Execution
from model.transformer import Transformer
from sharding.arrays import to_global
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from train.config import (
  LocalSGDConfig,
  OffloadConfig,
  OptimizerConfig,
  ScheduleConfig,
)
from train.layout import make_layout, natural
from train.objective import Objective, lm_loss
from train.optimizers import Optimizer, make_optimizer
from train.schedules import make_schedule
from train.state import TrainState, state_from_model
from train.step import make_train_step

# Divisible by 8 where a mesh may split, and no two sizes alike.
MHA = ModelConfig(
  vocab_size=104,
  num_layers=4,
  embed_dim=48,
  num_heads=8,
  num_kv_heads=8,
  head_dim=6,
  mlp_dim=80,
  max_positions=64,
  rope=Rope(theta=1e4),
  layer_pattern=("local",),
  window=5,
  qk_norm=True,
  qkv_bias=True,
)
# Two query heads a key/value head, and a head that shares the table.
GQA = dataclasses.replace(MHA, num_kv_heads=4, tied=True)
# All that a router can do; its losses are as large as the loss.
MOE = dataclasses.replace(
  GQA,
  num_layers=2,
  mlp_dim=40,
  moe=Moe(
    num_experts=16,
    num_active=3,
    num_shared=1,
    scores="sigmoid",
    scale=1.5,
    balance_loss=1.0,
    z_loss=0.1,
    bias_rate=0.05,
  ),
)
# The form in which experts have a limit.
MOE_CAPACITY = dataclasses.replace(
  MOE,
  moe=Moe(
    num_experts=8,
    num_active=2,
    capacity_factor=1.1,
    balance_loss=1.0,
    z_loss=0.1,
  ),
)
ROWS, LENGTH = 16, 24
OBJECTIVE = lm_loss(z_loss=1e-3)


def one_device() -> jax.sharding.Mesh:
  """The mesh without any parallelism."""
  return make_mesh(MeshConfig(), devices=jax.devices()[:1])


def random_model(config: ModelConfig) -> Transformer:
  """A model as if trained for a while: no bias is 0, no scale is 1.

  After three steps of AdamW a bias that starts at 0 is nothing but updates,
  whose relative error is far above that of the gradient where this is tiny.
  (Drawn by numpy: the initialiser of a whole model takes seconds to compile.)
  """
  rng = np.random.default_rng(7)
  spread = {"w": 0.15, "table": 0.15, "scale": 0.1, "b": 0.1, "bias": 0.1}

  def draw(path, leaf):
    name = jax.tree_util.keystr(path[:-1], simple=True, separator=".")
    name = name.rsplit(".", 1)[-1]
    value = rng.normal(float(name == "scale"), spread[name], leaf.shape)
    return value.astype(np.float32)

  model = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return jax.tree_util.tree_map_with_path(draw, model)


def packed_batch(
  seed: int = 0,
  *,
  rows: int = ROWS,
  length: int = LENGTH,
  vocab: int = 104,
  packed: bool = True,
) -> dict[str, np.ndarray]:
  """Rows of one to three segments and padding; weights differ by segment.

  Not packed: one segment fills a row.
  """
  rng = np.random.default_rng(seed)
  shape = (rows, length)
  batch = {
    "tokens": rng.integers(1, vocab, shape, dtype=np.int32),
    "targets": rng.integers(1, vocab, shape, dtype=np.int32),
    "positions": np.zeros(shape, np.int32),
    "segment_ids": np.zeros(shape, np.int32),
    "loss_weights": np.zeros(shape, np.float32),
  }
  for row in range(rows):
    start = 0
    for segment in range(1, (rng.integers(1, 4) if packed else 1) + 1):
      stop = min(length, start + int(rng.integers(2, length // 2)))
      stop = stop if packed else length
      batch["positions"][row, start:stop] = np.arange(stop - start)
      batch["segment_ids"][row, start:stop] = segment
      # The last token of a segment has no target.
      batch["loss_weights"][row, start : stop - 1] = rng.uniform(0.5, 1.5)
      start = stop
  return batch


def pairs_batch(seed: int = 0, **settings) -> dict[str, np.ndarray]:
  """Preference pairs, a row an answer; the last pair is padding."""
  batch = packed_batch(seed, packed=False, **settings)
  rng = np.random.default_rng(seed)
  for name in ("segment_ids", "loss_weights"):
    batch[name][-2:] = 0
  rows, length = batch["tokens"].shape
  answers = np.arange(length) >= rng.integers(2, length // 2, (rows, 1))
  batch["loss_weights"] = answers * (batch["loss_weights"] > 0)
  batch["loss_weights"] = batch["loss_weights"].astype(np.float32)
  reference = rng.normal(-100, 5, rows).astype(np.float32)
  return batch | {"reference_log_probs": reference}


def optimizer_of(config: OptimizerConfig) -> Optimizer:
  """A rule whose learning rate changes with every step."""
  schedule = ScheduleConfig(peak=1e-2, warmup_steps=2)
  return make_optimizer(config, make_schedule(schedule, 100))


def start(
  model: Transformer,
  optimizer: OptimizerConfig,
  mesh: jax.sharding.Mesh,
  *,
  objective: Objective = OBJECTIVE,
  accumulation: int = 1,
  rows_per_example: int = 1,
  rules: Rules = Rules(),
  zero_stage: int = 3,
  compression: str = "none",
  whole_steps: int = 0,
  schedule: str = "1f1b",
  virtual_stages: int = 1,
  offload: OffloadConfig = OffloadConfig(),
  local: LocalSGDConfig = LocalSGDConfig(),
  num_steps: int | None = None,
  **execution,
):
  """Returns the state before the first step, and the production step."""
  rule = optimizer_of(optimizer)
  layout = layout_of(model, mesh, virtual_stages)
  placed = dict(mesh=mesh, rules=rules, zero_stage=zero_stage, layout=layout)
  placed |= dict(compression=compression, offload=offload, local=local)
  state = state_from_model(model, rule, seed=3, **placed)
  train_step = make_train_step(
    objective,
    rule,
    Execution(mesh=mesh, rules=rules, **execution),
    jax.tree.map(lambda x: x.sharding, state),
    accumulation=accumulation,
    rows_per_example=rows_per_example,
    zero_stage=zero_stage,
    compression=compression,
    whole_steps=whole_steps,
    layout=layout,
    schedule=schedule,
    offload=offload,
    local=local,
    num_steps=num_steps,
  )
  return state, train_step


def layout_of(model: Transformer, mesh: jax.sharding.Mesh, virtual_stages=1):
  """Which layers stand where on a mesh with a pipeline."""
  return make_layout(
    model.config, mesh, seq_len=LENGTH, virtual_stages=virtual_stages
  )


def train(
  model: Transformer,
  optimizer: OptimizerConfig,
  mesh: jax.sharding.Mesh,
  *,
  num_steps: int = 3,
  make_batch: Callable[..., dict[str, np.ndarray]] = packed_batch,
  **settings,
) -> list[tuple[TrainState, dict]]:
  """Returns the (state, metrics) after each of the steps, on the host.

  Layers are in the order of the model.
  """
  state, train_step = start(model, optimizer, mesh, **settings)
  rules = settings.get("rules", Rules())
  layout = layout_of(model, mesh, settings.get("virtual_stages", 1))
  history = []
  for step in range(num_steps):
    batch = make_batch(step, vocab=model.config.vocab_size)
    state, metrics = train_step(state, to_global(batch, mesh, rules))
    history.append(jax.device_get((natural(state, layout), metrics)))
  return history


def distances(ours, theirs) -> dict[str, float]:
  """Path of each leaf -> |ours - theirs| / |theirs|, Euclidean."""
  flat, _ = jax.tree_util.tree_flatten_with_path(ours)
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): float(
      np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0)
    )
    for (path, a), b in zip(flat, jax.tree.leaves(theirs), strict=True)
  }
