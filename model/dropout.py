"""Dropout whose masks depend on the row, not on where the row is computed.

Each row of the global batch has a key of its own, so that every mesh and
every split into micro-batches draws the same masks.
"""

import jax
import jax.numpy as jnp


def row_keys(key: jax.Array, row_ids_B: jax.Array) -> jax.Array:
  """One key a row, from the number of the row in the global batch."""
  return jax.vmap(lambda row: jax.random.fold_in(key, row))(row_ids_B)


def fold(keys_B: jax.Array | None, data) -> jax.Array | None:
  """The keys for one of several uses; `data` is an integer."""
  if keys_B is None:
    return None
  return jax.vmap(lambda key: jax.random.fold_in(key, data))(keys_B)


def dropout(x: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
  """Zeroes elements of [B, ...] with probability `rate`, scales the rest.

  No keys means evaluation: `x` comes back as it is.
  """
  if keys_B is None or rate == 0.0:
    return x
  draw = lambda key: jax.random.bernoulli(key, 1.0 - rate, x.shape[1:])
  keep = jax.vmap(draw)(keys_B)
  return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
