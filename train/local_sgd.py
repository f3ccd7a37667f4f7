"""Local SGD: replicas train alone for many steps and then meet (DiLoCo).

Replicas of the weights stand on different slices (mesh axis `data`), with slow
links between them. Each takes H steps of its own, with an optimizer state of
its own, and nothing but scalars crosses `data`. Then the outer gradient, how
far the replicas went on average, crosses once, as float32, and moves the outer
weights theta by SGD with Nesterov's momentum v (arXiv:2311.08105, algorithm 1;
its optimizer is that of arXiv:1312.6120). With R replicas theta_r:

  g = 1/R sum_r (theta - theta_r)
  v <- mu v + g
  theta <- theta - lr (g + mu v)
  theta_r <- theta

With a delay of one step the sum crosses while the next inner step is computed,
which does not wait for it, and what replicas do in that step is kept. With
theta_r before that step and theta_r' after it, the last line becomes

  theta_r <- theta + (theta_r' - theta_r)

This is the overlap of Streaming DiLoCo (arXiv:2501.18512, section 2.2) with
tau = 1, but that the step taken meanwhile is added to the outer weights and not
mixed with them (there: alpha theta_r' + (1 - alpha) theta).

`TrainState.model` are the outer weights and `TrainState.opt_state` is v: what
evaluates, saves or exports a model knows nothing of this file.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.axes import Rules
from sharding.rules import tree_shardings
from train import exchange
from train.config import LocalSGDConfig

Tree = TypeVar("Tree")


class Replicas(NamedTuple):
  """What each of R replicas has for itself: every array is [R, ...].

  Attributes:
    model: its weights.
    opt_state: of its own optimizer.
  """

  model: nnx.Module
  opt_state: Any


def replica_axes(
  model: nnx.Module, mesh: Mesh, rules: Rules
) -> tuple[str, ...]:
  """Returns the mesh axes whose devices hold replicas of all weights.

  Args:
    model: the weights of one replica, abstract or real.
    mesh: of the run.
    rules: logical dim -> mesh axes.

  Raises:
    ValueError: there are none.
  """
  places = jax.tree.leaves(tree_shardings(model, mesh, rules))
  axes = exchange.replica_axes(places, mesh, rules)
  if not axes:
    raise ValueError(
      "step.local.steps is for replicas of the weights that train apart, but no"
      " mesh axis of rules.batch replicates them: set mesh.data above 1, or"
      " step.local.steps=none"
    )
  return axes


def begin(
  model: nnx.Module, opt_state: Any, mesh: Mesh, rules: Rules
) -> Replicas:
  """Returns replicas that are all alike, as before the first step.

  Args:
    model: the outer weights.
    opt_state: of the inner optimizer.
    mesh: of the run.
    rules: logical dim -> mesh axes.
  """
  num = 1
  for axis in replica_axes(model, mesh, rules):
    num *= mesh.shape[axis]
  return repeated(Replicas(model, opt_state), num)


def repeated(tree: Tree, num: int) -> Tree:
  """The same for `num` replicas."""
  return jax.tree.map(lambda x: jnp.broadcast_to(x, (num, *x.shape)), tree)


def shardings(
  replicas: Replicas | None, mesh: Mesh, rules: Rules
) -> Replicas | None:
  """Returns where replicas live: each on its own devices, split as `rules` say.

  Args:
    replicas: abstract ones; None: there are none.
    mesh: of the run.
    rules: logical dim -> mesh axes.
  """
  if replicas is None:
    return None
  one = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), replicas
  )
  axes = replica_axes(one.model, mesh, rules)
  return jax.tree.map(
    lambda place: NamedSharding(mesh, PartitionSpec(axes, *place.spec)),
    tree_shardings(one, mesh, rules),
  )


def outer_optimizer(config: LocalSGDConfig) -> optax.GradientTransformation:
  """What moves the outer weights."""
  return optax.sgd(
    config.outer_learning_rate,
    momentum=config.outer_momentum or None,
    nesterov=True,
  )


class Outer(NamedTuple):
  """The weights where replicas meet, and the state of what moves them."""

  model: nnx.Module
  opt_state: Any


def step_with(
  inner: Callable[[Replicas], tuple[Replicas, Any]],
  outer: Outer,
  replicas: Replicas,
  step: jax.Array,
  *,
  config: LocalSGDConfig,
  parts: nnx.Module,
  num_steps: int | None,
) -> tuple[Outer, Replicas, Any]:
  """Takes an inner step, and an outer one beside or after it if it is time.

  The last step of a run ends its last round, without delay.

  Args:
    inner: one step of all replicas, each for itself; what else it returns is
      passed on.
    outer: of the last step.
    replicas: of the last step.
    step: int32 scalar, counted from 0.
    config: when to meet, and how.
    parts: where the outer weights stand.
    num_steps: of the run; None: it has no end.
  """
  optimizer = outer_optimizer(config)

  def moved(outer: Outer, models: nnx.Module) -> Outer:
    gradient = jax.tree.map(
      lambda w, of_all: jnp.mean(w[None] - of_all, axis=0), outer.model, models
    )
    gradient = jax.lax.with_sharding_constraint(gradient, parts)
    updates, opt_state = optimizer.update(gradient, outer.opt_state)
    model = jax.tree.map(jnp.add, outer.model, updates)
    return Outer(model, opt_state)

  def alone(outer, replicas):
    replicas, report = inner(replicas)
    return outer, replicas, report

  def meanwhile(outer, replicas):
    before = replicas.model
    outer = moved(outer, before)
    replicas, report = inner(replicas)
    models = jax.tree.map(
      lambda w, after, before: w[None] + (after - before),
      outer.model,
      replicas.model,
      before,
    )
    return outer, replicas._replace(model=models), report

  def meet(outer, replicas):
    outer = moved(outer, replicas.model)
    models = jax.tree.map(
      lambda w, of_all: jnp.broadcast_to(w, of_all.shape),
      outer.model,
      replicas.model,
    )
    return outer, replicas._replace(model=models)

  is_last = False if num_steps is None else step + 1 == num_steps
  if config.delay:
    # The sum and the step that hides it are one computation: a collective in a
    # branch of its own would run beside nothing.
    of_before = (step > 0) & (step % config.steps == 0)
    outer, replicas, report = jax.lax.cond(
      of_before & jnp.logical_not(is_last), meanwhile, alone, outer, replicas
    )
    meeting = is_last
  else:
    outer, replicas, report = alone(outer, replicas)
    meeting = ((step + 1) % config.steps == 0) | is_last
  if meeting is not False:
    outer, replicas = jax.lax.cond(
      meeting, meet, lambda *same: same, outer, replicas
    )
  return outer, replicas, report


def check(
  config: LocalSGDConfig, *, mesh: Mesh, master_weights: bool, onebit: bool
) -> None:
  """Refuses what replicas that train apart cannot have.

  Args:
    config: of the run.
    mesh: of the run.
    master_weights: whether the model is kept rounded to bfloat16.
    onebit: whether the optimizer is 1-bit Adam.

  Raises:
    ValueError: one of these.
  """
  if config.steps is None:
    return
  if mesh.shape["pipeline"] > 1:
    raise ValueError(
      "step.local.steps is not for pipelines, whose stages add up the gradients"
      f" of all replicas: got mesh.pipeline={mesh.shape['pipeline']}. Set it to"
      " 1, or step.local.steps=none"
    )
  if master_weights:
    raise ValueError(
      "step.local.steps adds up float32 weights: wanted"
      " optimizer.master_weights=False, got True"
    )
  if onebit:
    raise ValueError(
      "optimizer.kind=onebit_adam is for gradients that cross every step, and"
      " with step.local.steps none do: set optimizer.kind=adamw, or"
      " step.local.steps=none"
    )
