"""The programs of a run on its mesh, before there are data and a state.

Every training main has its step from here, and so has who wants to know what
that step needs: `Program.lower` is the very program that the loop would run.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from model.config import ModelConfig
from model.execution import Execution
from model.transformer import Transformer
from sharding.arrays import batch_sharding, check_batch_size
from sharding.axes import Rules
from sharding.stages import Layout
from train import assembly
from train.config import OptimizerConfig, ScheduleConfig, StepConfig
from train.layout import to_arranged, to_natural
from train.objective import Objective
from train.optimizers import Optimizer, make_optimizer
from train.schedules import make_schedule
from train.state import (
  TrainState,
  abstract_arranged,
  abstract_state,
  init_state,
  shardings_of,
  state_from_model,
)
from train.step import TrainStep, make_eval_step, make_train_step


class Rows(Protocol):
  """What the configs of all data have: T, and examples a step."""

  @property
  def seq_len(self) -> int: ...
  @property
  def global_batch_size(self) -> int: ...


class Settings(Protocol):
  """What the configs of all training runs have; see `train/run_config.py`."""

  @property
  def data(self) -> Rows: ...
  @property
  def num_steps(self) -> int | None: ...
  @property
  def rules(self) -> Rules: ...
  @property
  def schedule(self) -> ScheduleConfig: ...
  @property
  def optimizer(self) -> OptimizerConfig: ...
  @property
  def step(self) -> StepConfig: ...
  @property
  def seed(self) -> int: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A run's step, and the state that it takes.

  Attributes:
    config: of the run.
    model: shape of the model.
    execution: how it runs.
    optimizer: what moves it.
    layout: order of the layers in a state, on a mesh with a pipeline.
    abstract: a state as checkpoints have it: shapes, dtypes, shardings.
    shardings: of the state that the step takes.
    train_step: (state, batch) -> (state, metrics).
    eval_step: (model, batch) -> sums of the loss.
    num_rows: of a batch.
    row_fields: what a batch has for each row beside tokens, float32 [rows].
  """

  config: Settings
  model: ModelConfig
  execution: Execution
  optimizer: Optimizer
  layout: Layout | None
  abstract: TrainState
  shardings: TrainState
  train_step: TrainStep
  eval_step: Callable
  num_rows: int
  row_fields: tuple[str, ...] = ()

  def start(self, model: nnx.Module | None = None) -> TrainState:
    """Returns the state before the first step.

    Args:
      model: weights to start from, which stay valid; None: new ones.
    """
    placed = _placed(self.config, self.execution.mesh)
    placed |= {"seed": self.config.seed, "layout": self.layout}
    if model is not None:
      return state_from_model(model, self.optimizer, **placed)
    make_model = lambda rngs: Transformer(self.model, rngs=rngs)
    return init_state(make_model, self.optimizer, **placed)

  def arranged(self, state: TrainState) -> TrainState:
    """Returns the state of a checkpoint as the step takes it."""
    return to_arranged(state, self.layout, self.shardings)

  def natural(self, state: TrainState) -> TrainState:
    """Returns a state of the step as checkpoints have it."""
    return to_natural(state, self.layout, shardings_of(self.abstract))

  def lower(self) -> jax.stages.Lowered:
    """Returns the step for the compiler; nothing is allocated.

    The devices of the mesh may be those of a topology that is not here.
    """
    mesh, rules = self.execution.mesh, self.execution.rules
    split = batch_sharding(mesh, rules)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(
      shape, dtype, sharding=split
    )
    tokens = self.num_rows, self.config.data.seq_len
    names = ("tokens", "targets", "positions", "segment_ids")
    batch = {name: array(jnp.int32, *tokens) for name in names}
    batch["loss_weights"] = array(jnp.float32, *tokens)
    for name in self.row_fields:
      batch[name] = array(jnp.float32, self.num_rows)
    state = abstract_arranged(
      self.abstract,
      self.layout,
      mesh=mesh,
      rules=rules,
      zero_stage=self.config.step.zero_stage,
    )
    return self.train_step.on_leaves.lower(jax.tree.leaves(state), batch)


def make_program(
  config: Settings,
  model: ModelConfig,
  objective: Objective,
  *,
  mesh: Mesh,
  eval_objective: Objective | None = None,
  rows_per_example: int = 1,
  row_fields: tuple[str, ...] = (),
) -> Program:
  """Makes the step of a run.

  Args:
    config: of the run.
    model: shape of the model.
    objective: what to minimise.
    mesh: the devices.
    eval_objective: what held-out data are measured by; None: the same.
    rows_per_example: neighbouring rows that the objective reads together.
    row_fields: see `Program`.

  Raises:
    ValueError: a setting that cannot be.
  """
  assert config.num_steps is not None, "a schedule wants the length of the run"
  step, rules, data = config.step, config.rules, config.data
  num_rows = rows_per_example * data.global_batch_size
  check_batch_size(
    num_rows,
    mesh,
    rules,
    accumulation=step.accumulation,
    rows_per_example=rows_per_example,
  )
  execution = assembly.make_execution(step, mesh, rules)
  optimizer = make_optimizer(
    config.optimizer, make_schedule(config.schedule, config.num_steps)
  )
  layout = assembly.make_layout(step, model, mesh, seq_len=data.seq_len)
  abstract = abstract_state(
    lambda rngs: Transformer(model, rngs=rngs),
    optimizer,
    **_placed(config, mesh),
  )
  shardings = shardings_of(
    abstract_arranged(
      abstract, layout, mesh=mesh, rules=rules, zero_stage=step.zero_stage
    )
  )
  train_step = make_train_step(
    objective,
    optimizer,
    execution,
    shardings,
    accumulation=step.accumulation,
    rows_per_example=rows_per_example,
    zero_stage=step.zero_stage,
    compression=step.compression,
    whole_steps=step.whole_steps,
    layout=layout,
    schedule=step.schedule,
    offload=step.offload,
    local=step.local,
    num_steps=config.num_steps,
  )
  eval_step = make_eval_step(
    eval_objective or objective,
    execution,
    shardings.model,
    rows_per_example=rows_per_example,
    layout=layout,
  )
  return Program(
    config=config,
    model=model,
    execution=execution,
    optimizer=optimizer,
    layout=layout,
    abstract=abstract,
    shardings=shardings,
    train_step=train_step,
    eval_step=eval_step,
    num_rows=num_rows,
    row_fields=row_fields,
  )


def _placed(config: Settings, mesh: Mesh) -> dict:
  """What a state needs to know of the run."""
  step = config.step
  return {
    "mesh": mesh,
    "rules": config.rules,
    "zero_stage": step.zero_stage,
    "compression": step.compression,
    "offload": step.offload,
    "local": step.local,
  }
