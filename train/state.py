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
from sharding.rules import tree_shardings
from train import exchange
from train.optimizers import Optimizer

MakeModel = Callable[[nnx.Rngs], nnx.Module]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """What a step takes and gives back, and a checkpoint saves.

  Attributes:
    step: int32 scalar, steps taken.
    model: the weights, float32, or bfloat16 where the optimizer keeps them.
    opt_state: moments (and master weights), each split like its weight.
    rng: uint32 [2], the run's threefry key as plain data.
    residual: what devices owe to compressed sums of gradients, a
      `sharding.compression.Residual`; None: nothing.
  """

  step: jax.Array
  model: nnx.Module
  opt_state: Any
  rng: jax.Array
  residual: Any = None


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

  Raises:
    ValueError: a weight does not divide over the mesh, or nothing is
      replicated that could be compressed.
  """
  where = {"mesh": mesh, "rules": rules, "compression": compression}
  abstract = jax.eval_shape(
    lambda: _new_state(make_model(nnx.Rngs(0)), optimizer, seed=0, **where)
  )
  return _with_shardings(abstract, mesh, rules, zero_stage)


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

  Raises:
    ValueError: a weight does not divide over the mesh, or nothing is
      replicated that could be compressed.
  """
  where = {"mesh": mesh, "rules": rules, "compression": compression}
  abstract = abstract_state(
    make_model, optimizer, zero_stage=zero_stage, **where
  )
  init = jax.jit(
    lambda: _new_state(
      make_model(nnx.Rngs(seed)), optimizer, seed=seed, **where
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

  Raises:
    ValueError: a weight does not divide over the mesh, or nothing is
      replicated that could be compressed.
  """
  where = {"mesh": mesh, "rules": rules, "compression": compression}
  new = lambda model: _new_state(model, optimizer, seed=seed, **where)
  shardings = shardings_of(
    _with_shardings(jax.eval_shape(new, model), mesh, rules, zero_stage)
  )
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
) -> TrainState:
  """Returns the state before the first step."""
  residual = exchange.no_residual(model, mesh, rules, compression)
  model, opt_state = optimizer.start(model)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    model=model,
    opt_state=opt_state,
    rng=jax.random.key_data(jax.random.key(seed, impl="threefry2x32")),
    residual=residual,
  )


def _with_shardings(
  abstract: TrainState, mesh: Mesh, rules: Rules, zero_stage: int
) -> TrainState:
  """Adds to each abstract leaf where it will live."""
  places = dataclasses.replace(
    tree_shardings(abstract, mesh, rules),
    model=tree_shardings(
      abstract.model, mesh, zero.parameter_rules(rules, zero_stage)
    ),
    residual=jax.tree.map(
      lambda _: exchange.residual_sharding(mesh), abstract.residual
    ),
  )
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=place
    ),
    abstract,
    places,
  )
