"""What a device holds between two steps, on a mesh that is not there.

Shapes, dtypes and places are those of the training loop's own state.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from model.config import ModelConfig
from model.precision import Precision
from model.transformer import Transformer
from sharding import zero
from sharding.axes import MeshConfig, Rules
from sharding.mesh import axis_sizes
from sharding.rules import mesh_axes, stacked, tree_shardings, without_axes
from sharding.stages import Layout
from train.config import (
  LocalSGDConfig,
  OffloadConfig,
  OptimizerConfig,
  ScheduleConfig,
  StepConfig,
)
from train.layout import make_layout
from train.optimizers import make_optimizer
from train.run_config import PretrainConfig
from train.schedules import make_schedule
from train.state import TrainState, abstract_arranged, abstract_state
from train.step import check_together


@dataclasses.dataclass(frozen=True)
class Held:
  """A training state, where it would live.

  Attributes:
    mesh: without devices.
    rules: logical dim -> mesh axes.
    state: shapes, dtypes and shardings.
    layout: of the layers on a mesh with a pipeline.
    zero_stage: what of the state is split.
  """

  mesh: AbstractMesh
  rules: Rules
  state: TrainState
  layout: Layout | None
  zero_stage: int

  @functools.cached_property
  def weights(self) -> list["Weight"]:
    """The weights of the model, in the order of its leaves."""
    model, stage = self.state.model, self.zero_stage
    rules = (
      zero.parameter_rules(self.rules, stage),
      zero.gradient_rules(self.rules, stage),
      self.rules,
    )
    places = (
      jax.tree.leaves(tree_shardings(model, self.mesh, one)) for one in rules
    )
    leaves = zip(jax.tree.leaves(model), stacked(model), *places, strict=True)
    return [Weight(*leaf) for leaf in leaves]


class Weight(NamedTuple):
  """A weight: where it is kept, summed and updated.

  Attributes:
    leaf: an abstract array.
    layers: whether it stacks layers.
    kept: its sharding between steps.
    summed: its gradient's, while micro-batches add to it.
    updated: the sharding of its optimizer state.
  """

  leaf: jax.ShapeDtypeStruct
  layers: bool
  kept: NamedSharding
  summed: NamedSharding
  updated: NamedSharding


def abstract_mesh(config: MeshConfig, num_devices: int) -> AbstractMesh:
  """The mesh that `sharding.mesh.make_mesh` would make of so many devices.

  Raises:
    ValueError: the sizes do not fit the devices.
  """
  sizes = axis_sizes(config, num_devices)
  used = math.prod(sizes.values())
  if used != num_devices:
    raise ValueError(
      f"config.mesh uses {used} of the {num_devices} devices of the topology:"
      " set one of its axes to -1 (the rest), or plan for fewer devices"
    )
  axis_types = (AxisType.Auto,) * len(sizes)
  return AbstractMesh(
    tuple(sizes.values()), tuple(sizes), axis_types=axis_types
  )


def hold(config: PretrainConfig, num_devices: int) -> Held:
  """The state that a run would have on so many devices.

  Raises:
    ValueError: a weight does not divide over the mesh, or what else the
      training loop refuses.
  """
  step = config.step
  return _hold(
    config.model,
    config.optimizer,
    config.rules,
    abstract_mesh(config.mesh, num_devices),
    # What else a step has changes no state.
    step.zero_stage,
    step.compression,
    step.local,
    step.offload,
    step.virtual_stages,
    config.data.seq_len,
  )


@functools.lru_cache(maxsize=64)
def _hold(
  model: ModelConfig,
  optimizer: OptimizerConfig,
  rules: Rules,
  mesh: AbstractMesh,
  zero_stage: int,
  compression: str,
  local: LocalSGDConfig,
  offload: OffloadConfig,
  virtual_stages: int,
  seq_len: int,
) -> Held:
  rule = make_optimizer(optimizer, make_schedule(ScheduleConfig(), 1))
  where = {"mesh": mesh, "rules": rules, "zero_stage": zero_stage}
  settings = {"compression": compression, "local": local}
  check_together(rule, mesh, offload=offload, **settings)
  state = abstract_state(
    lambda rngs: Transformer(model, rngs=rngs), rule, **settings, **where
  )
  layout = make_layout(
    model,
    mesh,
    seq_len=seq_len,
    virtual_stages=virtual_stages,
  )
  state = abstract_arranged(state, layout, **where)
  return Held(mesh, rules, state, layout, zero_stage)


def gradients(held: Held, step: StepConfig) -> nnx.Module:
  """The gradients of a step, as they are added up."""
  rules = held.rules
  if step.accumulation > 1 or held.layout is not None:
    rules = zero.gradient_rules(rules, step.zero_stage)
  places = tree_shardings(held.state.model, held.mesh, rules)
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=place
    ),
    held.state.model,
    places,
  )


def at_work(held: Held, precision: Precision) -> tuple[int, int]:
  """Bytes of the weights of one layer, and of the head, while they are used.

  Whole over the axes that split tokens, as operands of matmuls; beside them
  their gradient, before it is scattered. Of the head, also the scattered one:
  it is made before the backward pass has others.

  Args:
    held: the state.
    precision: of the run.
  """
  model, rules = held.state.model, held.rules
  splits_tokens = (*rules.batch, *rules.seq)
  gathered = without_axes(rules, splits_tokens)
  gathered = dataclasses.replace(
    gathered, expert=rules.expert, layers=rules.layers
  )
  operand = jnp.dtype(precision.operands).itemsize
  layer = 0
  for leaf, place, layers in zip(
    jax.tree.leaves(model),
    jax.tree.leaves(tree_shardings(model, held.mesh, gathered)),
    stacked(model),
    strict=True,
  ):
    size = math.prod(place.shard_shape(leaf.shape))
    if layers:
      size //= place.shard_shape(leaf.shape)[0]
      layer += size * (operand + leaf.dtype.itemsize)
  config = model.config
  vocab = math.prod(held.mesh.shape[a] for a in mesh_axes("vocab", gathered))
  whole = config.vocab_size * config.embed_dim // vocab
  parts = math.prod(held.mesh.shape[a] for a in mesh_axes("embed", rules))
  head = whole * (operand + 4) + 4 * whole // parts
  return layer, head


def device_bytes(tree: Any, *, offloaded: bool = False) -> tuple[int, int]:
  """Bytes of one device: in its own memory, and in its host's.

  Args:
    tree: of abstract arrays with shardings.
    offloaded: whether stacked layers stand in host memory.
  """
  totals = [0, 0]
  for leaf, layers in zip(jax.tree.leaves(tree), stacked(tree), strict=True):
    shape = leaf.sharding.shard_shape(leaf.shape)
    on_host = offloaded and layers
    totals[on_host] += math.prod(shape) * leaf.dtype.itemsize
  return totals[0], totals[1]


def whole_bytes(held: Held) -> int:
  """Bytes of the whole state, as a checkpoint holds it."""
  leaves = jax.tree.leaves(held.state)
  return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
