"""Everything a run must keep between two steps, as one pytree.

The position in the data is not here: batches are a function of (seed, step).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from sharding import zero
from sharding.axes import Rules
from sharding.offload import check_platform
from sharding.rules import tree_shardings
from sharding.stages import Layout
from train import exchange, local_sgd
from train.config import LocalSGDConfig, OffloadConfig
from train.layout import arranged
from train.offload import placed
from train.optimizers import Optimizer

MakeModel = Callable[[nnx.Rngs], nnx.Module]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """What a step takes and gives back, and a checkpoint saves.

  Attributes:
    step: int32 scalar, steps taken.
    model: the weights, float32, or bfloat16 where the optimizer keeps them.
    opt_state: moments (and master weights), each split like its weight, of
      what moves `model`.
    rng: uint32 [2], the run's threefry key as plain data.
    residual: what devices owe to compressed sums of gradients, a
      `sharding.compression.Residual`; None: nothing.
    replicas: `train.local_sgd.Replicas` that train apart, `model` being the
      outer weights where they meet; None: all train `model`.
  """

  step: jax.Array
  model: nnx.Module
  opt_state: Any
  rng: jax.Array
  residual: Any = None
  replicas: Any = None


def step_key(state: TrainState) -> jax.Array:
  """Returns the key of the next step: a function of the seed and the step."""
  key = jax.random.wrap_key_data(state.rng, impl="threefry2x32")
  return jax.random.fold_in(key, state.step)


def abstract_state(
  make_model: MakeModel,
  optimizer: Optimizer,
  *,
  mesh: Mesh,
  rules: Rules,
  zero_stage: int = 3,
  compression: str = "none",
  offload: OffloadConfig = OffloadConfig(),
  local: LocalSGDConfig = LocalSGDConfig(),
) -> TrainState:
  """Returns shapes, dtypes and shardings of a state, allocating nothing.

  What a checkpoint is restored into.

  Args:
    make_model: builds the model from its random streams.
    optimizer: gives the moments.
    mesh: where the state will live.
    rules: logical dim -> mesh axes.
    zero_stage: what is split over `fsdp`, see `sharding/zero.py`.
    compression: of gradients between replicas, see `train/exchange.py`.
    offload: what stands in host memory.
    local: whether replicas train apart.

  Raises:
    ValueError: a weight does not divide over the mesh, or nothing is
      replicated that could be compressed or train apart.
  """
  where = {"mesh": mesh, "rules": rules}
  where |= {"compression": compression, "local": local}
  abstract = jax.eval_shape(
    lambda: _new_state(
      make_model(nnx.Rngs(0)), optimizer, seed=0, layout=None, **where
    )
  )
  return _with_shardings(abstract, mesh, rules, zero_stage, offload)


def abstract_arranged(
  abstract: TrainState,
  layout: Layout | None,
  *,
  mesh: Mesh,
  rules: Rules,
  zero_stage: int = 3,
) -> TrainState:
  """Returns the same of a state whose layers stand in a pipeline's layout.

  What a step takes, on a mesh with a pipeline.
  """
  if layout is None or layout.is_natural:
    return abstract
  arranged_ = jax.eval_shape(lambda state: arranged(state, layout), abstract)
  return _with_shardings(arranged_, mesh, rules, zero_stage, OffloadConfig())


def shardings_of(abstract: TrainState) -> TrainState:
  """Returns the placement of every leaf of a state, as the same tree."""
  return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def init_state(
  make_model: MakeModel,
  optimizer: Optimizer,
  *,
  seed: int,
  mesh: Mesh,
  rules: Rules,
  zero_stage: int = 3,
  compression: str = "none",
  layout: Layout | None = None,
  offload: OffloadConfig = OffloadConfig(),
  local: LocalSGDConfig = LocalSGDConfig(),
) -> TrainState:
  """Draws new weights; every array is born on its own devices.

  The values depend on the seed alone, not (but for rounding) on the mesh.

  Args:
    make_model: builds the model from its random streams.
    optimizer: gives the moments.
    seed: of the weights and of dropout.
    mesh: where the state lives.
    rules: logical dim -> mesh axes.
    zero_stage: what is split over `fsdp`, see `sharding/zero.py`.
    compression: of gradients between replicas, see `train/exchange.py`.
    layout: of the layers on a mesh with a pipeline; None: as in the model.
    offload: what stands in host memory.
    local: whether replicas train apart.

  Raises:
    ValueError: a weight does not divide over the mesh, or nothing is
      replicated that could be compressed or train apart.
  """
  where = {"mesh": mesh, "rules": rules}
  where |= {"compression": compression, "local": local}
  abstract = abstract_state(
    make_model, optimizer, zero_stage=zero_stage, offload=offload, **where
  )
  abstract = abstract_arranged(
    abstract, layout, mesh=mesh, rules=rules, zero_stage=zero_stage
  )
  init = jax.jit(
    lambda: _new_state(
      make_model(nnx.Rngs(seed)), optimizer, seed=seed, layout=layout, **where
    ),
    out_shardings=shardings_of(abstract),
  )
  return init()


def state_from_model(
  model: nnx.Module,
  optimizer: Optimizer,
  *,
  seed: int,
  mesh: Mesh,
  rules: Rules,
  zero_stage: int = 3,
  compression: str = "none",
  layout: Layout | None = None,
  offload: OffloadConfig = OffloadConfig(),
  local: LocalSGDConfig = LocalSGDConfig(),
) -> TrainState:
  """Starts from given weights (fine-tuning), which stay valid: they are copied.

  Args:
    model: the weights, on any devices.
    optimizer: gives the moments.
    seed: of dropout.
    mesh: where the state lives.
    rules: logical dim -> mesh axes.
    zero_stage: what is split over `fsdp`, see `sharding/zero.py`.
    compression: of gradients between replicas, see `train/exchange.py`.
    layout: of the layers on a mesh with a pipeline; None: as in the model.
    offload: what stands in host memory.
    local: whether replicas train apart.

  Raises:
    ValueError: a weight does not divide over the mesh, or nothing is
      replicated that could be compressed or train apart.
  """
  where = {"mesh": mesh, "rules": rules}
  where |= {"compression": compression, "local": local}
  new = lambda model: _new_state(
    model, optimizer, seed=seed, layout=layout, **where
  )
  shardings = shardings_of(
    _with_shardings(
      jax.eval_shape(new, model), mesh, rules, zero_stage, offload
    )
  )
  if layout is None or layout.is_natural:
    model = jax.device_put(model, shardings.model)
  # Without a copy the state would share the caller's buffers, and the first
  # step, which donates its state, would delete them.
  start = jax.jit(
    lambda model: new(jax.tree.map(jnp.copy, model)), out_shardings=shardings
  )
  return start(model)


def _new_state(
  model: nnx.Module,
  optimizer: Optimizer,
  *,
  seed: int,
  mesh: Mesh,
  rules: Rules,
  compression: str,
  local: LocalSGDConfig,
  layout: Layout | None,
) -> TrainState:
  """Returns the state before the first step."""
  residual = exchange.no_residual(model, mesh, rules, compression)
  model, opt_state = optimizer.start(arranged(model, layout))
  replicas = None
  if local.steps is not None:
    replicas = local_sgd.begin(model, opt_state, mesh, rules)
    opt_state = local_sgd.outer_optimizer(local).init(model)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    model=model,
    opt_state=opt_state,
    rng=jax.random.key_data(jax.random.key(seed, impl="threefry2x32")),
    residual=residual,
    replicas=replicas,
  )


def _with_shardings(
  abstract: TrainState,
  mesh: Mesh,
  rules: Rules,
  zero_stage: int,
  offload: OffloadConfig,
) -> TrainState:
  """Adds to each abstract leaf where it will live."""
  alike = dataclasses.replace(abstract, replicas=None)
  places = dataclasses.replace(
    tree_shardings(alike, mesh, rules),
    model=tree_shardings(
      abstract.model, mesh, zero.parameter_rules(rules, zero_stage)
    ),
    residual=jax.tree.map(
      lambda _: exchange.residual_sharding(mesh), abstract.residual
    ),
    replicas=local_sgd.shardings(abstract.replicas, mesh, rules),
  )
  if offload != OffloadConfig():
    check_platform(mesh.devices.flat[0].platform)
  for name, there in dict(
    model=offload.parameters, opt_state=offload.optimizer
  ).items():
    if there:
      on_host = placed(getattr(places, name), getattr(abstract, name))
      places = dataclasses.replace(places, **{name: on_host})
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=place
    ),
    abstract,
    places,
  )
