"""AdamW and SGD with a decay mask, clipping and a schedule.

Moments and updates are float32 under every precision policy; so are parameters
and gradients, unless the optimizer keeps master weights.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sharding.rules import is_variable
from train.config import OptimizerConfig
from train.schedules import Schedule

# Attributes that hold no matrix: biases, and the scales of norms.
NOT_DECAYED = ("b", "bias", "scale")


class Mastered(NamedTuple):
  """The state of an optimizer that keeps the weights of a bfloat16 model.

  Attributes:
    weights: float32, structured like the model.
    moments: of the rule.
  """

  weights: nnx.Module
  moments: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
  """A rule for updates; made by `make_optimizer`.

  Attributes:
    direction: gradients -> descent directions (before the learning rate).
    schedule: step -> learning rate.
    clip_norm: largest global norm of a gradient; None: any.
    master_weights: whether its state keeps the weights, and the model holds
      them rounded to bfloat16.
    b1: decay of the momentum.
    b2: decay of the variance, of 1-bit Adam.
    eps: added to its root, of 1-bit Adam.
    freeze_step: of 1-bit Adam, the step from which on the variance stands
      still and momenta cross between replicas; None: another rule.
  """

  direction: optax.GradientTransformation
  schedule: Schedule
  clip_norm: float | None
  master_weights: bool = False
  b1: float = 0.0
  b2: float = 0.0
  eps: float = 0.0
  freeze_step: int | None = None

  def momentum(self, opt_state: Any) -> tuple[nnx.Module, nnx.Module]:
    """Returns 1-bit Adam's momentum, and by what it is divided in an update.

    Both structured like the model.
    """
    state = (opt_state.moments if self.master_weights else opt_state)[0]
    of_nu = 1 - self.b2 ** jnp.minimum(state.count, self.freeze_step)
    # Before the first step both are 0.
    of_nu = jnp.where(state.count > 0, of_nu, 1.0)
    root = jax.tree.map(lambda v: jnp.sqrt(v / of_nu) + self.eps, state.nu)
    return state.mu, root

  @property
  def largest_direction(self) -> float:
    """How far Adam can go: |m| / sqrt(v) of any gradients, by Cauchy-Schwarz.

    m and v are sums of g and g^2 with weights (1 - b1) b1^t, (1 - b2) b2^t.
    """
    if self.b1**2 >= self.b2:
      return math.inf
    return (1 - self.b1) / math.sqrt((1 - self.b2) * (1 - self.b1**2 / self.b2))

  def start(self, weights: nnx.Module) -> tuple[nnx.Module, Any]:
    """Returns the model to train and the state before the first step.

    Args:
      weights: float32.
    """
    moments = self.direction.init(weights)
    if not self.master_weights:
      return weights, moments
    return _rounded(weights), Mastered(weights, moments)

  def update(
    self, grads: nnx.Module, opt_state: Any, model: nnx.Module, step: jax.Array
  ) -> tuple[nnx.Module, Any, dict[str, jax.Array]]:
    """Takes one step.

    Args:
      grads: of the mean loss, float32, structured like the model.
      opt_state: from `start` or the last `update`.
      model: the weights.
      step: int32 scalar, counted from 0.

    Returns:
      The new weights, the new state, and float32 scalars: grad_norm (before
      clipping), clip_factor (1: not clipped), learning_rate.
    """
    factor, metrics = self.clipping(global_norm(grads), step)
    grads = jax.tree.map(lambda g: g * factor, grads)
    model, opt_state = self.move(grads, opt_state, model, step)
    return model, opt_state, metrics

  def clipping(
    self, grad_norm: jax.Array, step: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns what to multiply gradients by, and what to report."""
    factor = jnp.ones_like(grad_norm)
    if self.clip_norm is not None:
      # A norm of 0 gives the factor 1: min(1, inf).
      factor = jnp.minimum(1.0, self.clip_norm / grad_norm)
    metrics = {
      "grad_norm": grad_norm,
      "clip_factor": factor,
      "learning_rate": self.schedule(step),
    }
    return factor, metrics

  def move(
    self, grads: nnx.Module, opt_state: Any, model: nnx.Module, step: jax.Array
  ) -> tuple[nnx.Module, Any]:
    """Returns the new weights and the new state, by clipped gradients.

    Each leaf follows from its own: a tree may lack some.
    """
    learning_rate = self.schedule(step)
    weights, moments = opt_state if self.master_weights else (model, opt_state)
    directions, moments = self.direction.update(grads, moments, weights)
    weights = jax.tree.map(
      lambda w, d: w - learning_rate * d, weights, directions
    )
    if self.master_weights:
      return _rounded(weights), Mastered(weights, moments)
    return weights, moments


def make_optimizer(config: OptimizerConfig, schedule: Schedule) -> Optimizer:
  """Builds AdamW (arXiv:1711.05101), 1-bit Adam or SGD from its settings."""
  match config.kind:
    case "adamw":
      parts = [optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)]
    case "sgd":
      # Without momentum there are no moments to store.
      trace = optax.trace(config.momentum)
      parts = [trace if config.momentum else optax.identity()]
    case "onebit_adam":
      parts = [
        _scale_by_onebit_adam(
          config.b1, config.b2, config.eps, config.freeze_step
        )
      ]
    case _:
      raise ValueError(
        "optimizer.kind must be 'onebit_adam', 'adamw' or 'sgd', got"
        f" {config.kind!r}"
      )
  if config.weight_decay:
    parts.append(optax.add_decayed_weights(config.weight_decay, mask=decayed))
  return Optimizer(
    direction=optax.chain(*parts),
    schedule=schedule,
    clip_norm=config.clip_norm,
    master_weights=config.master_weights,
    b1=config.b1,
    b2=config.b2,
    eps=config.eps,
    freeze_step=config.freeze_step,
  )


def _scale_by_onebit_adam(
  b1: float, b2: float, eps: float, freeze_step: int
) -> optax.GradientTransformation:
  """Adam whose variance stands still from a step on (arXiv:2102.02888).

  Not as in the paper, moments are corrected for their start at 0, the variance
  as it stood when it was frozen: the step where this happens is no jump.
  """

  def init(weights):
    return optax.scale_by_adam(b1, b2, eps).init(weights)

  def update(grads, state, params=None):
    del params
    frozen = state.count >= freeze_step
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
    nu = jax.tree.map(
      lambda v, g: jnp.where(frozen, v, b2 * v + (1 - b2) * g**2),
      state.nu,
      grads,
    )
    count = state.count + 1
    of_mu = 1 - b1**count
    of_nu = 1 - b2 ** jnp.minimum(count, freeze_step)
    directions = jax.tree.map(
      lambda m, v: m / of_mu / (jnp.sqrt(v / of_nu) + eps), mu, nu
    )
    return directions, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

  return optax.GradientTransformation(init, update)


def decayed(model: nnx.Module) -> nnx.Module:
  """Marks the weights that decay: matrices and embeddings.

  Norm scales and biases do not decay: pulling a scale to 0 or a bias to the
  origin regularises nothing. The attribute's name decides, not the number of
  dims: a query bias is [heads, head_dim] and every stacked scale has a layers
  dim. Embeddings do decay, as in GPT-3 and Llama.

  Returns:
    The same tree of booleans.
  """

  def mark(path, leaf):
    # The key of the weight itself; below it nnx may add one for its value.
    name = jax.tree_util.keystr(path[-1:], simple=True)
    decays = name not in NOT_DECAYED
    return leaf.replace(decays) if is_variable(leaf) else decays

  return jax.tree_util.tree_map_with_path(mark, model, is_leaf=is_variable)


def global_norm(tree: Any) -> jax.Array:
  """Returns the root of the sum of squares of all leaves, float32."""
  leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
  return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in leaves))


def _rounded(weights: nnx.Module) -> nnx.Module:
  """The same in bfloat16."""
  return jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
