"""A weight is declared once: its dims, their logical names, its initialiser.

Initialisation, sharding, checkpoint schema and accounting all read the
`names` kept here; see `sharding/rules.py`.
"""

import jax
import jax.numpy as jnp
from flax import nnx


def weight(rngs: nnx.Rngs, initializer, **dims: int) -> nnx.Param:
  """A float32 parameter whose dims are called by their logical names.

  Args:
    rngs: its `params` stream draws the values.
    initializer: (key, shape, dtype) -> array, as in `jax.nn.initializers`.
    **dims: logical name -> size, in order.

  Example:
    weight(rngs, normal(0.02), embed=512, heads=8, head_dim=64)
  """
  value = initializer(rngs.params(), tuple(dims.values()), jnp.float32)
  return nnx.Param(value, names=tuple(dims))


def normal(std: float):
  """Gaussian of standard deviation `std`."""
  return jax.nn.initializers.normal(std)


def fan_in(size: int, *, branches: int = 1):
  """Gaussian that keeps the variance of a product over `size` inputs.

  Args:
    size: how many products each output sums.
    branches: how many such outputs the residual stream sums; GPT-2 divides
      its output projections by the square root of it.
  """
  return normal((size * branches) ** -0.5)


zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones
