"""Rows that count for nothing and may hold anything."""

import jax
import jax.numpy as jnp


def readable(x: jax.Array, counts: jax.Array) -> jax.Array:
  """x with zeros in the rows that do not count and are not finite.

  A weight of 0 does not hide a NaN: 0 NaN = NaN. What is finite stays: its
  loss is the derivative by its weight.

  Args:
    x: [..., D].
    counts: bool [...].
  """
  # Of float32: what is done in bf16 is multiplied, cast or moved, no more.
  finite = jnp.all(jnp.isfinite(x.astype(jnp.float32)), axis=-1)
  return jnp.where((counts | finite)[..., None], x, jnp.zeros_like(x))
