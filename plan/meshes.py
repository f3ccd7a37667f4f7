"""The meshes on which a model can be trained at all, and why not on others."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
from flax import nnx

from model.transformer import Transformer
from plan import activations, held
from sharding.arrays import check_batch_size
from sharding.axes import MESH_AXES, MeshConfig
from sharding.rules import tree_shardings
from train import exchange, local_sgd
from train.config import ScheduleConfig
from train.layout import make_layout
from train.optimizers import make_optimizer
from train.pipeline import make_stages
from train.run_config import PretrainConfig
from train.schedules import make_schedule
from train.step import check_together


@dataclasses.dataclass(frozen=True)
class Meshes:
  """All ways to arrange some devices.

  Attributes:
    legal: those on which the run's step can be built.
    refused: the others, with the reason of the training loop.
  """

  legal: list[MeshConfig]
  refused: dict[MeshConfig, str]


def find(config: PretrainConfig, num_devices: int) -> Meshes:
  """Tries all meshes of so many devices.

  A run's `mesh` is not read. Axes that a run has no use for, `expert` without
  experts, are 1.

  Args:
    config: the run, with its batch, rules and step.
    num_devices: of the machine.
  """
  model = jax.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
  legal, refused = [], {}
  for mesh in every(num_devices, experts=config.model.moe is not None):
    try:
      check(dataclasses.replace(config, mesh=mesh), model, num_devices)
    except ValueError as error:
      refused[mesh] = str(error)
    else:
      legal.append(mesh)
  return Meshes(legal, refused)


def check(config: PretrainConfig, model: Transformer, num_devices: int) -> None:
  """Refuses what the training loop refuses, by the same functions.

  Args:
    config: the run.
    model: an abstract one of its shape.
    num_devices: of the machine.

  Raises:
    ValueError: the reason.
  """
  step, data, rules = config.step, config.data, config.rules
  mesh = held.abstract_mesh(config.mesh, num_devices)
  check_batch_size(
    data.global_batch_size, mesh, rules, accumulation=step.accumulation
  )
  rule = make_optimizer(config.optimizer, make_schedule(ScheduleConfig(), 1))
  check_together(
    rule,
    mesh,
    compression=step.compression,
    offload=step.offload,
    local=step.local,
  )
  exchange.no_residual(model, mesh, rules, step.compression)
  if step.local.steps is not None:
    local_sgd.replica_axes(model, mesh, rules)
  tree_shardings(model, mesh, rules)
  activations.share(
    config.model,
    mesh.shape,
    rules,
    seq_len=data.seq_len,
    rows=data.global_batch_size // step.accumulation,
  )
  layout = make_layout(
    config.model,
    mesh,
    seq_len=data.seq_len,
    virtual_stages=step.virtual_stages,
  )
  make_stages(step.schedule, layout, mesh, step.accumulation)


def every(num_devices: int, *, experts: bool) -> Iterator[MeshConfig]:
  """Yields each way to write the number as a product of sizes of axes.

  Args:
    num_devices: of the machine.
    experts: whether `expert` may be more than 1.
  """
  axes = [a for a in MESH_AXES if experts or a != "expert"]
  divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
  for others in itertools.product(divisors, repeat=len(axes) - 1):
    first, rest = divmod(num_devices, math.prod(others))
    if not rest:
      sizes = dict(zip(axes, (first, *others), strict=True))
      yield MeshConfig(**({"fsdp": 1} | sizes))
