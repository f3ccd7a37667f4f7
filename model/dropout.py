"""Dropout whose masks depend on the token, not on where it is computed.

Each row of the global batch has a key of its own and each token a number in
its row, so that every mesh, every split into micro-batches and every order of
the tokens draws the same masks.
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


def dropout(
  x: jax.Array,
  rate: float,
  keys_B: jax.Array | None,
  numbers_BT: jax.Array | None = None,
) -> jax.Array:
  """Zeroes elements of [B, ...] with probability `rate`, scales the rest.

  Args:
    x: [B, ...], with numbers [B, T, ...].
    rate: share that is dropped.
    keys_B: a PRNG key a row. None: evaluation, `x` comes back as it is.
    numbers_BT: int32, of each token in its row; None: a row is drawn at once.
  """
  if keys_B is None or rate == 0.0:
    return x
  keys = keys_B
  if numbers_BT is not None:
    of_row = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = jax.vmap(of_row)(keys_B, numbers_BT)
  shape = x.shape[keys.ndim :]
  draw = lambda key: jax.random.bernoulli(key, 1.0 - rate, shape)
  for _ in range(keys.ndim):
    draw = jax.vmap(draw)
  keep = draw(keys)
  return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
