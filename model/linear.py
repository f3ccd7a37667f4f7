"""A matmul with a weight, written as an einsum."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from model import weights
from model.execution import Execution
from model.precision import einsum

# What the "dots" rematerialisation policy keeps.
SAVED_NAME = "linear"


class Linear(nnx.Module):
  """y = einsum(equation, x, w) + b."""

  def __init__(
    self,
    equation: str,
    initializer,
    *,
    rngs: nnx.Rngs,
    bias: bool = False,
    **dims: int,
  ):
    """Declares the weights.

    Args:
      equation: "BTD,DNH->BTNH"; the bias has the dims of `w` that stay.
      initializer: of `w`; the bias starts at zero.
      rngs: its `params` stream draws `w`.
      bias: whether there is one.
      **dims: logical name -> size of the dims of `w`, in order.
    """
    self.equation = equation
    self.w = weights.weight(rngs, initializer, **dims)
    inputs, out = equation.split("->")
    letters = zip(inputs.split(",")[1], dims.items(), strict=True)
    kept = dict(item for letter, item in letters if letter in out)
    self.b = weights.weight(rngs, weights.zeros, **kept) if bias else None

  def __call__(self, x: jax.Array, execution: Execution) -> jax.Array:
    """The product, in the policy's activation dtype."""
    y = einsum(self.equation, x, self.w[...], execution.precision)
    if self.b is not None:
      b = self.b[...]
      sum_ = y.astype(jnp.float32) + b.reshape(
        (1,) * (y.ndim - b.ndim) + b.shape
      )
      y = sum_.astype(y.dtype)
    return checkpoint_name(y, SAVED_NAME)
