"""Our own training step, as `train.pretrain` builds it."""

import jax
import numpy as np

from benchmarks import turns
from benchmarks.contestants import case
from model.transformer import Transformer
from sharding.arrays import to_global
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from train.assembly import make_execution
from train.config import OptimizerConfig, ScheduleConfig, StepConfig
from train.objective import lm_loss
from train.optimizers import make_optimizer
from train.schedules import make_schedule
from train.state import abstract_state, init_state, shardings_of
from train.step import make_train_step


def main():
  config, batch_size, length, options = case.parse()
  mesh, rules = make_mesh(MeshConfig()), Rules()
  precision = "float32" if options.dtype == "float32" else "auto"
  # A loop over layers copies what backward needs in and out of stacks, and
  # logits that stay in the caches are read at their speed.
  step_config = StepConfig(
    precision=precision, unroll=config.num_layers, loss_chunk=512
  )
  execution = make_execution(step_config, mesh, rules)
  # Nobody else clips or warms up here.
  schedule = make_schedule(ScheduleConfig(kind="constant", peak=3e-4), 100)
  optimizer = make_optimizer(OptimizerConfig(clip_norm=None), schedule)
  make_model = lambda rngs: Transformer(config, rngs=rngs)
  placed = dict(mesh=mesh, rules=rules)
  shardings = shardings_of(abstract_state(make_model, optimizer, **placed))
  state = init_state(make_model, optimizer, seed=0, **placed)
  train_step = make_train_step(lm_loss(), optimizer, execution, shardings)

  shape = batch_size, length
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape)
  tokens = tokens.astype(np.int32)
  batch = to_global(
    dict(
      tokens=tokens,
      targets=np.roll(tokens, -1, axis=1),
      positions=np.tile(np.arange(length, dtype=np.int32), (batch_size, 1)),
      segment_ids=np.ones(shape, np.int32),
      loss_weights=np.ones(shape, np.float32),
    ),
    mesh,
    rules,
  )

  def step():
    nonlocal state
    state, metrics = train_step(state, batch)
    metrics["loss"].block_until_ready()

  turns.serve(step, jax=jax.__version__)


if __name__ == "__main__":
  main()
