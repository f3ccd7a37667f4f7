"""The cache as a table of slots."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.kv_cache import KVCache, write, write_layer, write_positions
from tests.model.tiny import CONFIG

B, S, L = 3, 7, CONFIG.num_layers
K, H = CONFIG.num_kv_heads, CONFIG.head_dim


def filled(stacked: bool) -> KVCache:
  """A cache with a different number everywhere."""
  cache = KVCache.zeros(CONFIG, B, S, "float32", stacked=stacked)
  leaves, tree = jax.tree.flatten(cache)
  count = lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)
  return jax.tree.unflatten(tree, map(count, leaves))


def layers(kv) -> np.ndarray:
  """[L, B, K, S, H] of either form."""
  return np.stack([np.asarray(x) for x in kv])


@pytest.mark.parametrize("stacked", [True, False])
def test_zeros(stacked):
  cache = KVCache.zeros(CONFIG, B, S, "bfloat16", stacked=stacked)
  assert cache.length == S
  for kv in (cache.k, cache.v):
    assert layers(kv).shape == (L, B, K, S, H)
    assert {x.dtype.name for x in jax.tree.leaves(kv)} == {"bfloat16"}
  np.testing.assert_array_equal(cache.positions, np.full((B, S), -1))
  with pytest.raises(ValueError, match="65 slots is longer than .*=64"):
    KVCache.zeros(CONFIG, B, 65, "float32")


@pytest.mark.parametrize("stacked", [True, False])
def test_resized_and_take(stacked):
  cache = filled(stacked)
  longer = cache.resized(S + 4)
  assert longer.length == S + 4
  for before, after in ((cache.k, longer.k), (cache.v, longer.v)):
    np.testing.assert_array_equal(layers(after)[..., :S, :], layers(before))
    np.testing.assert_array_equal(layers(after)[..., S:, :], 0)
  np.testing.assert_array_equal(longer.positions[:, :S], cache.positions)
  np.testing.assert_array_equal(longer.positions[:, S:], -1)

  rows = jnp.array([2, 0, 2, 1])
  taken = cache.take(rows)
  for before, after in ((cache.k, taken.k), (cache.v, taken.v)):
    np.testing.assert_array_equal(layers(after), layers(before)[:, rows])
  np.testing.assert_array_equal(taken.positions, cache.positions[rows])


def test_writes_land_in_their_slots_and_nowhere_else():
  cache = filled(True)
  slots = jnp.array([[1, 3], [0, 1], [6, S]])  # S: past the end, not written
  x = -1.0 - jnp.arange(B * 2 * K * H, dtype=jnp.float32).reshape(B, 2, K, H)
  want = np.array(cache.k[1])
  for row in range(B):
    for t in range(2):
      if slots[row, t] < S:
        want[row, :, slots[row, t]] = x[row, t]
  np.testing.assert_array_equal(write(cache.k[1], slots, x), want)
  whole = write_layer(cache.k, jnp.int32(1), slots, x)
  np.testing.assert_array_equal(whole[1], want)
  np.testing.assert_array_equal(whole[::2], cache.k[::2])
  low = write(cache.k[1].astype(jnp.bfloat16), slots, x)
  assert low.dtype == jnp.bfloat16


def test_positions_are_written_like_values():
  cached = jnp.full((2, 4), -1)
  slots, positions = jnp.array([[0, 4], [2, 3]]), jnp.array([[5, 6], [7, 8]])
  after = write_positions(cached, slots, positions)
  assert after.tolist() == [[5, -1, -1, -1], [-1, -1, 7, 8]]


def test_slots():
  cache = filled(True)
  positions = jnp.array([[0, 1, 2]])
  segments = jnp.array([[1, 1, 0]])
  assert cache.slots(positions, None).tolist() == [[0, 1, 2]]
  assert cache.slots(positions, segments).tolist() == [[0, 1, S]]
  with pytest.raises(ValueError, match="8 tokens a row .* 7 slots"):
    cache.slots(jnp.arange(8)[None], None)


def test_is_a_pytree():
  cache = KVCache.zeros(CONFIG, B, S, "float32")
  assert len(jax.tree.leaves(cache)) == 3
  apart = KVCache.zeros(CONFIG, B, S, "float32", stacked=False)
  assert len(jax.tree.leaves(apart)) == 2 * L + 1
  with pytest.raises(dataclasses.FrozenInstanceError):
    cache.k = cache.v
