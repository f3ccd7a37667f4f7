"""AdamW and SGD with a decay mask, clipping and a schedule.

Parameters, gradients, moments and updates are float32 under every precision
policy.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sharding.rules import is_variable
from train.config import OptimizerConfig
from train.schedules import Schedule

# Attributes that hold no matrix: biases, and the scales of norms.
NOT_DECAYED = ("b", "bias", "scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
  """A rule for updates; made by `make_optimizer`.

  Attributes:
    direction: gradients -> descent directions (before the learning rate).
    schedule: step -> learning rate.
    clip_norm: largest global norm of a gradient; None: any.
  """

  direction: optax.GradientTransformation
  schedule: Schedule
  clip_norm: float | None

  def init(self, model: nnx.Module) -> Any:
    """Returns the moments, shaped and named like the model's weights."""
    return self.direction.init(model)

  def update(
    self, grads: nnx.Module, opt_state: Any, model: nnx.Module, step: jax.Array
  ) -> tuple[nnx.Module, Any, dict[str, jax.Array]]:
    """Takes one step.

    Args:
      grads: of the mean loss, float32, structured like the model.
      opt_state: from `init` or the last `update`.
      model: the weights, float32.
      step: int32 scalar, counted from 0.

    Returns:
      The new weights, the new state, and float32 scalars: grad_norm (before
      clipping), clip_factor (1: not clipped), learning_rate.
    """
    grad_norm = global_norm(grads)
    clip_factor = jnp.ones_like(grad_norm)
    if self.clip_norm is not None:
      # A norm of 0 gives the factor 1: min(1, inf).
      clip_factor = jnp.minimum(1.0, self.clip_norm / grad_norm)
      grads = jax.tree.map(lambda g: g * clip_factor, grads)
    learning_rate = self.schedule(step)
    directions, opt_state = self.direction.update(grads, opt_state, model)
    model = jax.tree.map(lambda w, d: w - learning_rate * d, model, directions)
    metrics = {
      "grad_norm": grad_norm,
      "clip_factor": clip_factor,
      "learning_rate": learning_rate,
    }
    return model, opt_state, metrics


def make_optimizer(config: OptimizerConfig, schedule: Schedule) -> Optimizer:
  """Builds AdamW (arXiv:1711.05101) or SGD from its settings."""
  match config.kind:
    case "adamw":
      parts = [optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)]
    case "sgd":
      # Without momentum there are no moments to store.
      trace = optax.trace(config.momentum)
      parts = [trace if config.momentum else optax.identity()]
    case _:
      raise ValueError(
        f"optimizer.kind must be 'adamw' or 'sgd', got {config.kind!r}"
      )
  if config.weight_decay:
    parts.append(optax.add_decayed_weights(config.weight_decay, mask=decayed))
  return Optimizer(
    direction=optax.chain(*parts),
    schedule=schedule,
    clip_norm=config.clip_norm,
  )


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
  return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))
