"""Dropout of attention probabilities, the same bits in every implementation.

A probability is kept by a hash of where it stands, so that no mask is ever
stored and none depends on how scores are cut into tiles. A query of a head
has two random words; the hash is SplitMix (Steele, Lea and Flood, 2014) with
the 32-bit finaliser of MurmurHash3, counting keys from the first word on.
Queries whose first words lie close would share parts of their masks: the
second word, in the middle of the finaliser, parts them.
"""

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B9  # 2 ** 32 over the golden ratio
_MIX_1, _MIX_2 = 0x85EBCA6B, 0xC2B2AE35


def row_words(keys_B: jax.Array, index: jax.Array, num_heads: int):
  """Two random words of each query, uint32 [2, B, N, T].

  Args:
    keys_B: a PRNG key a batch row.
    index: int32 [T] or [B, T], the number of each query in its row.
    num_heads: N.
  """

  def of_query(key, index):
    return jax.random.bits(jax.random.fold_in(key, index), (2, num_heads))

  over_queries = jax.vmap(of_query, in_axes=(None, 0), out_axes=-1)
  rows = None if index.ndim == 1 else 0
  return jax.vmap(over_queries, in_axes=(0, rows), out_axes=1)(keys_B, index)


def kept(
  words: tuple[jax.Array, jax.Array], key_index: jax.Array, rate: float
) -> jax.Array:
  """Which probabilities stay.

  Args:
    words: uint32, the two of each query.
    key_index: int32, the position of each key.
    rate: share that is dropped, to within 2 ** -31.

  Returns:
    bool, of the shape that the arguments broadcast to.
  """
  first, second = words
  x = first + key_index.astype(jnp.uint32) * jnp.uint32(_GOLDEN)
  x = (x ^ (x >> 16)) * jnp.uint32(_MIX_1) ^ second
  x = (x ^ (x >> 13)) * jnp.uint32(_MIX_2)
  x = x ^ (x >> 16)
  # Signed: a TPU compares no unsigned numbers.
  return (x >> 1).astype(jnp.int32) >= jnp.int32(rate * 2**31)


def drop(
  weights: jax.Array,
  words: tuple[jax.Array, jax.Array],
  key_index: jax.Array,
  rate: float,
) -> jax.Array:
  """Weights with some at 0 and the others scaled to keep their expectation."""
  keep = kept(words, key_index, rate)
  return jnp.where(keep, weights * (1.0 / (1.0 - rate)), 0.0)
