"""Keys and values of the tokens seen so far."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from model.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """A slot a position: the token at position p of a row stands in slot p.

  Attributes:
    k: [L, B, K, S, H], or a tuple of L arrays [B, K, S, H] for a model whose
      layers are a list. Attention of a new token reads it as it lies.
    v: as `k`.
    positions: int32 [B, S], the position held by each slot; -1: empty.
  """

  k: jax.Array | tuple[jax.Array, ...]
  v: jax.Array | tuple[jax.Array, ...]
  positions: jax.Array

  @classmethod
  def zeros(
    cls,
    config: ModelConfig,
    batch: int,
    length: int,
    dtype: str,
    *,
    stacked: bool = True,
  ) -> Self:
    """An empty cache of `length` slots a row."""
    if length > config.max_positions:
      raise ValueError(
        f"a cache of {length} slots is longer than"
        f" model.max_positions={config.max_positions}"
      )
    shape = (batch, config.num_kv_heads, length, config.head_dim)
    L = config.num_layers
    if stacked:
      empty = lambda: jnp.zeros((L, *shape), dtype)
    else:
      empty = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(L))
    positions = jnp.full((batch, length), -1, jnp.int32)
    return cls(k=empty(), v=empty(), positions=positions)

  @property
  def length(self) -> int:
    """Number of slots a row, S."""
    return self.positions.shape[1]

  def slots(
    self, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
  ) -> jax.Array:
    """The slot of each token; padding gets one past the last: not written.

    A position past the last slot is not written either, and cannot be seen
    here: whoever decodes makes the cache long enough.

    Raises:
      ValueError: there are more tokens a row than slots.
    """
    num_tokens = positions_BT.shape[1]
    if segment_ids_BT is None and num_tokens > self.length:
      raise ValueError(
        f"{num_tokens} tokens a row do not fit a cache of {self.length} slots;"
        " make it longer (KVCache.zeros, KVCache.resized)"
      )
    if segment_ids_BT is None:
      return positions_BT
    return jnp.where(segment_ids_BT == 0, self.length, positions_BT)

  def resized(self, length: int) -> Self:
    """The same with empty slots added up to `length` a row."""
    more = length - self.length
    pad = lambda x, axis, fill: jnp.pad(
      x,
      [(0, more if i == axis else 0) for i in range(x.ndim)],
      constant_values=fill,
    )
    slots = lambda x: pad(x, x.ndim - 2, 0)
    return type(self)(
      k=jax.tree.map(slots, self.k),
      v=jax.tree.map(slots, self.v),
      positions=pad(self.positions, 1, -1),
    )

  def take(self, rows: jax.Array) -> Self:
    """The rows [n], which may repeat, in this order."""
    pick = lambda x: jnp.take(x, rows, axis=x.ndim - 4)
    return type(self)(
      k=jax.tree.map(pick, self.k),
      v=jax.tree.map(pick, self.v),
      positions=self.positions[rows],
    )


def write(cache_BKSH: jax.Array, slots_BT: jax.Array, x_BTKH: jax.Array):
  """The cache of one layer with `x` in its slots."""
  index = _index(cache_BKSH.shape[:2], slots_BT)
  x = x_BTKH.astype(cache_BKSH.dtype)
  return cache_BKSH.at[index].set(x, mode="drop")


def write_layer(cache, layer, slots_BT: jax.Array, x_BTKH: jax.Array):
  """The stacked cache [L, B, K, S, H] with `x` in the slots of one layer."""
  index = _index(cache.shape[1:3], slots_BT)
  x = x_BTKH.astype(cache.dtype)
  return cache.at[layer, *index].set(x, mode="drop")


def write_positions(
  cached_BS: jax.Array, slots_BT: jax.Array, positions_BT: jax.Array
):
  """The position in each slot, once these tokens are there."""
  rows = jnp.arange(len(cached_BS))[:, None]
  return cached_BS.at[rows, slots_BT].set(positions_BT, mode="drop")


def _index(size: tuple[int, int], slots_BT: jax.Array) -> tuple:
  """Row, head and slot of values [B, T, K, H]; `size` is (B, K)."""
  B, K = size
  rows, heads = jnp.arange(B)[:, None, None], jnp.arange(K)[None, None]
  return rows, heads, slots_BT[..., None]
