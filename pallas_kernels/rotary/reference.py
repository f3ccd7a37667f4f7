"""Rotary embedding in plain jnp."""

import jax
import jax.numpy as jnp


def rotate(x_BTNH: jax.Array, cos_BTP: jax.Array, sin_BTP: jax.Array):
  """Rotates the pairs of dims (i, i + P); see `op.rotary`."""
  cos, sin = cos_BTP[:, :, None, :], sin_BTP[:, :, None, :]
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  rotated = first * cos - second * sin, second * cos + first * sin
  return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)
