"""The hash behind dropout of attention."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention.dropout import drop, kept, row_words
from tests.pallas_kernels.flash_attention import oracle


def masks(rate, *, keys, index, num_heads=4, num_keys=250):
  """bool [B, N, T, S]."""
  words = row_words(keys, jnp.asarray(index), num_heads)
  slots = jnp.arange(num_keys).reshape(1, 1, 1, -1)
  return np.asarray(kept(tuple(words[..., None]), slots, rate))


def test_is_the_hash_that_it_says():
  keys = jax.random.split(jax.random.key(0), 2)
  words = row_words(keys, jnp.arange(5), 3)
  want = oracle.keep(words, 77, 0.3)
  got = masks(0.3, keys=keys, index=np.arange(5), num_heads=3, num_keys=77)
  np.testing.assert_array_equal(got, want)


def test_masks_depend_on_the_row_and_the_query_alone():
  keys = jax.random.split(jax.random.key(0), 3)
  whole = masks(0.25, keys=keys, index=[0, 1, 2, 3])
  part = masks(0.25, keys=keys[1:], index=[2, 3])
  np.testing.assert_array_equal(part, whole[1:, :, 2:])


def test_masks_are_as_random_as_they_should_be():
  rate, num_keys = 0.25, 1000
  keys = jax.random.split(jax.random.key(1), 4)
  x = masks(rate, keys=keys, index=range(8), num_keys=num_keys)
  x = x.reshape(-1, num_keys).astype(float)  # 128 rows
  # Five standard deviations of the mean, of rows, of columns and of pairs.
  deviation = (rate * (1 - rate)) ** 0.5
  near = lambda got, want, n, s=deviation: np.testing.assert_allclose(
    got, want, atol=5 * s / n**0.5
  )
  near(x.mean(), 1 - rate, x.size)
  near(x.mean(1), 1 - rate, num_keys)
  near(x.mean(0), 1 - rate, len(x))
  centred = (x - (1 - rate)) / deviation
  between_rows = centred @ centred.T / num_keys
  np.fill_diagonal(between_rows, 0.0)
  near(between_rows, 0.0, num_keys, 1.2)
  for lag in (1, 2, 3, 8, 100):  # neighbours of a row
    near((centred[:, lag:] * centred[:, :-lag]).mean(), 0.0, x.size, 1.2)
    near((centred[lag:] * centred[:-lag]).mean(), 0.0, x.size / 4, 1.2)


def test_keeps_the_expectation():
  keys = jax.random.split(jax.random.key(2), 2)
  words = tuple(row_words(keys, jnp.arange(3), 2)[..., None])
  slots = jnp.arange(500).reshape(1, 1, 1, -1)
  got = np.asarray(drop(jnp.ones((2, 2, 3, 500)), words, slots, 0.2))
  np.testing.assert_allclose(np.unique(got), [0.0, 1.25])
