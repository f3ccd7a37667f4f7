"""The step: what it reduces, reports, refuses and never compiles twice."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.execution import Execution
from sharding.arrays import to_global
from sharding.axes import MeshConfig, Rules
from sharding.hlo import collectives
from sharding.mesh import make_mesh
from tests.tolerances import tolerance
from tests.train import tiny
from train.config import OptimizerConfig
from train.objective import lm_loss
from train.state import state_from_model
from train.step import make_eval_step, make_train_step

RULES = Rules()


class Line(nnx.Module):
  """y = w x + b on feature dim 8, small enough for a closed form."""

  def __init__(self):
    self.w = nnx.Param(jnp.linspace(-1.0, 1.0, 8), names=("embed",))
    self.b = nnx.Param(jnp.float32(0.5), names=())


def pair_loss(model, batch, key, execution):
  """Depends on which rows are neighbours, and on the row's global number."""
  del key, execution
  y = batch["x"] @ model.w[...] + model.b[...]
  first, second = y[0::2], y[1::2]
  ids = batch["row_ids"][0::2].astype(jnp.float32)
  return (
    jnp.sum(batch["weights"][0::2] * jnp.square(first - 2.0 * second)),
    jnp.sum(batch["weights"][0::2]),
    {"ids": jnp.sum(ids * first)},
  )


def line_batch(rows: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(rows)
  return {
    "tokens": np.zeros((rows, 1), np.int32),
    "x": rng.normal(size=(rows, 8)).astype(np.float32),
    "weights": rng.uniform(0.0, 2.0, rows).astype(np.float32),
  }


def line_step(mesh, loss=pair_loss, optimizer=None, **settings):
  config = optimizer or OptimizerConfig(kind="sgd", weight_decay=0.0)
  rule = tiny.optimizer_of(config)
  state = state_from_model(Line(), rule, seed=0, mesh=mesh, rules=RULES)
  step = make_train_step(
    loss,
    rule,
    Execution(mesh=mesh, rules=RULES),
    jax.tree.map(lambda x: x.sharding, state),
    **settings,
  )
  return state, step


MESHES = [
  MeshConfig(fsdp=1),
  MeshConfig(data=4, fsdp=2),
  MeshConfig(data=2, fsdp=2, tensor=2),
]


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("config", MESHES)
def test_closed_form_of_a_quadratic(config, accumulation):
  """Loss, gradient norm, clipping and update against numpy in float64."""
  mesh = make_mesh(config)
  state, step = line_step(mesh, accumulation=accumulation, rows_per_example=2)
  batch = line_batch(64)
  new, metrics = step(state, to_global(batch, mesh, RULES))

  x, w = batch["x"].astype(np.float64), np.linspace(-1.0, 1.0, 8)
  y = x @ w + 0.5
  weights = batch["weights"][0::2].astype(np.float64)
  residual = y[0::2] - 2.0 * y[1::2]
  total = weights.sum()
  slope = 2.0 * weights * residual
  dw = slope @ (x[0::2] - 2.0 * x[1::2]) / total
  db = -slope.sum() / total
  norm = np.sqrt((dw**2).sum() + db**2)
  assert norm > 1.0, "the test needs a gradient that is clipped"
  rate = 1e-2 / 2
  want = {
    "loss": (weights * residual**2).sum() / total,
    "weight_sum": total,
    "grad_norm": norm,
    "clip_factor": 1.0 / norm,
    "learning_rate": rate,
    "nonfinite": 0.0,
    "ids": (np.arange(64)[0::2] * y[0::2]).sum() / total,
  }
  w, b = w - rate * dw / norm, 0.5 - rate * db / norm
  want["param_norm"] = np.sqrt((w**2).sum() + b**2)
  assert metrics.keys() == want.keys()
  close = tolerance("mesh")
  for name, value in want.items():
    np.testing.assert_allclose(metrics[name], value, **close, err_msg=name)
  np.testing.assert_allclose(new.model.w[...], w, **close)
  np.testing.assert_allclose(new.model.b[...], b, **close)
  assert int(new.step) == 1


def test_batch_that_micro_batches_do_not_divide():
  mesh = make_mesh(MeshConfig(data=4, fsdp=2))
  state, step = line_step(mesh, accumulation=4, rows_per_example=2)
  with pytest.raises(ValueError) as error:
    step(state, to_global(line_batch(32), mesh, RULES))
  for part in ("global_batch_size=32", "64", "accumulation=4"):
    assert part in str(error.value)


def test_nothing_but_padding_changes_nothing():
  mesh = make_mesh(MeshConfig(data=4, fsdp=2))
  state, step = line_step(mesh, accumulation=2)
  before = jax.device_get(state.model)
  batch = line_batch(32) | {"weights": np.zeros(32, np.float32)}
  state, metrics = step(state, to_global(batch, mesh, RULES))
  assert metrics["loss"] == 0 and metrics["weight_sum"] == 0
  assert metrics["nonfinite"] == 0
  np.testing.assert_array_equal(state.model.w[...], before.w[...])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_nonfinite_is_flagged(bad):
  """3e38 is finite, the loss is not: its square overflows."""
  mesh = make_mesh(MeshConfig())
  state, step = line_step(mesh)
  batch = line_batch(8)
  batch["x"][5, 3] = bad
  _, metrics = step(state, to_global(batch, mesh, RULES))
  assert metrics["nonfinite"] == 1


def test_aux_must_not_hide_a_metric():
  def loss(model, batch, key, execution):
    total, weight, aux = pair_loss(model, batch, key, execution)
    return total, weight, {"grad_norm": aux["ids"]}

  mesh = make_mesh(MeshConfig())
  state, step = line_step(mesh, loss)
  with pytest.raises(AssertionError, match="grad_norm"):
    step(state, to_global(line_batch(8), mesh, RULES))


@pytest.fixture(scope="module")
def model():
  config = dataclasses.replace(tiny.GQA, num_layers=2)
  return tiny.random_model(config)


def compiled_collectives(model, mesh, accumulation):
  """The collectives of a step, and how many weights a device holds."""
  state, step = tiny.start(
    model, OptimizerConfig(), mesh, accumulation=accumulation, remat="block"
  )
  batch = to_global(tiny.packed_batch(), mesh, RULES)
  lowered = step.on_leaves.lower(jax.tree.leaves(state), batch)
  compiled = lowered.compile()
  leaves = jax.tree.leaves(state.model)
  share = sum(leaf.addressable_shards[0].data.size for leaf in leaves)
  return collectives(compiled.as_text(), mesh), share


@pytest.mark.parametrize(
  "config",
  [MeshConfig(data=8, fsdp=1), MeshConfig(data=2, fsdp=2, tensor=2)],
  ids=["8x1x1", "2x2x2"],
)
def test_one_gradient_reduction_a_step(model, config):
  """Counted in the compiled program, by size and by who talks to whom."""
  mesh = make_mesh(config)
  ops, share = compiled_collectives(model, mesh, accumulation=2)
  between_replicas = [op for op in ops if "data" in op.axes]
  assert not [op for op in between_replicas if op.in_loop]
  assert {op.kind for op in between_replicas} == {"all-reduce"}
  # Each device's share of the gradient, and the sums of loss, weight, nll and
  # z_loss: once.
  assert sum(op.num_elements for op in between_replicas) == share + 4
  # Splitting into micro-batches moves no row to another device. What moves are
  # embeddings of two rows, half of each, and their gradients, to the shards of
  # the table that gave them.
  kinds = ("all-to-all", "collective-permute")
  moved = [op for op in ops if op.kind in kinds]
  for op in moved:
    assert (op.kind, op.axes) == ("all-to-all", {"fsdp"})
    assert {shape.dtype for shape in op.operands} == {"f32"}
    half = tiny.LENGTH // 2
    assert op.num_elements == 2 * half * model.config.embed_dim
  assert len(moved) == (2 if config.fsdp > 1 else 0)
  if config.fsdp > 1:
    # The counter does see what is inside the loop.
    inside = {axis for op in ops if op.in_loop for axis in op.axes}
    assert inside == {"fsdp", "tensor"}


def test_chunks_of_the_loss_reduce_nothing(model):
  """Without micro-batches, only layers reduce in a loop, each its own."""
  mesh = make_mesh(MeshConfig(data=8, fsdp=1))
  ops, share = compiled_collectives(model, mesh, accumulation=1)
  in_loop = sum(op.num_elements for op in ops if op.in_loop)
  assert in_loop == sum(x.size for x in jax.tree.leaves(model.layers)) // 2
  # The table twice: its use as a head, and as an embedding.
  table = model.embed.table[...].size
  outside = sum(op.num_elements for op in ops if not op.in_loop)
  assert outside == share - 2 * in_loop + table + 3


def test_compiled_once_and_donated(model, caplog):
  mesh = make_mesh(MeshConfig(data=2, fsdp=4))
  state, step = tiny.start(model, OptimizerConfig(), mesh, accumulation=2)
  compiled = []
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    for i in range(4):
      batch = to_global(tiny.packed_batch(i), mesh, RULES)
      before = state
      state, metrics = step(state, batch)
      jax.block_until_ready(metrics)
      assert all(x.is_deleted() for x in jax.tree.leaves(before))
      compiled.append(
        sum("Compiling jit(train_step)" in r.message for r in caplog.records)
      )
  assert compiled == [1, 1, 1, 1]
  assert step.on_leaves._cache_size() == 1
  assert int(state.step) == 4


def test_overfits_two_batches_and_evaluation_agrees(model):
  """The loss falls under 0.1 nats; `eval_step` gives the sums of the same."""
  mesh = make_mesh(MeshConfig(), devices=jax.devices()[:1])
  optimizer = OptimizerConfig(weight_decay=0.0)
  state, step = tiny.start(model, optimizer, mesh)
  # Few rows: two segments that start alike could not both be learnt.
  host = [tiny.packed_batch(i, rows=4) for i in (0, 1)]
  batches = [to_global(batch, mesh, RULES) for batch in host]
  evaluate = make_eval_step(
    lm_loss(z_loss=1e-3),
    Execution(mesh=mesh),
    jax.tree.map(lambda x: x.sharding, state.model),
  )
  loss, weight, aux = evaluate(state.model, batches[0])
  losses = []
  for i in range(120):
    state, metrics = step(state, batches[i % 2])
    losses.append(float(metrics["loss"]))
  np.testing.assert_allclose(losses[0], loss / weight, **tolerance("loss"))
  np.testing.assert_allclose(aux["nll"] + aux["z_loss"], loss, rtol=1e-6)
  assert losses[0] > 4.0
  assert losses[-1] < 0.1, losses[::10]


def test_packing_changes_nothing(model):
  """Four documents in four rows, or in two."""
  T = tiny.LENGTH
  rng = np.random.default_rng(5)
  documents = [rng.integers(1, 104, n, dtype=np.int32) for n in (9, 12, 7, 10)]

  def rows(layout):
    batch = {
      name: np.zeros((4, T), np.int32)
      for name in ("tokens", "targets", "positions", "segment_ids")
    } | {"loss_weights": np.zeros((4, T), np.float32)}
    for row, members in enumerate(layout):
      start = 0
      for segment, index in enumerate(members, start=1):
        ids = documents[index]
        here = slice(start, start + len(ids) - 1)
        batch["tokens"][row, here] = ids[:-1]
        batch["targets"][row, here] = ids[1:]
        batch["positions"][row, here] = np.arange(len(ids) - 1)
        batch["segment_ids"][row, here] = segment
        batch["loss_weights"][row, here] = 1.0
        start += len(ids) - 1
    return batch

  mesh = make_mesh(MeshConfig(), devices=jax.devices()[:1])
  results = []
  sgd = OptimizerConfig(kind="sgd", momentum=0.9, clip_norm=None)
  for layout in ([[0], [1], [2], [3]], [[3, 1], [], [2, 0], []]):
    state, step = tiny.start(model, sgd, mesh)
    state, metrics = step(state, to_global(rows(layout), mesh, RULES))
    results.append(jax.device_get((state.opt_state, metrics)))
  assert results[0][1]["weight_sum"] == sum(len(d) - 1 for d in documents)
  far = tiny.distances(results[0], results[1])
  assert max(far.values()) < tolerance("mesh")["rtol"], far
