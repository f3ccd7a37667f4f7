"""What an attention call asks for, apart from its large arrays."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """The static part of a call; see `flash_attention` for the meaning."""

  causal: bool
  window: int | None
  scale: float
  soft_cap: float | None
  dropout_rate: float
  operands: str


class Rows(NamedTuple):
  """Where each query or key stands.

  Attributes:
    index: int32 [1 or B, T], the position that causality and windows compare.
    segment_ids: int32 [B, T], 0 for padding; None: all of one segment.
  """

  index: jax.Array
  segment_ids: jax.Array | None

  def cut(self, first: int, last: int) -> "Rows":
    """The rows [first, last)."""
    return jax.tree.map(lambda x: x[:, first:last], self)


def visible(options: Options, queries: Rows, keys: Rows) -> jax.Array:
  """Which keys each query may see, bool [1 or B, T, S]."""
  ahead = queries.index[:, :, None] - keys.index[:, None, :]
  seen = jnp.ones_like(ahead, bool)
  if options.causal:
    seen &= ahead >= 0
  if options.window is not None:
    seen &= ahead < options.window
    if not options.causal:
      seen &= ahead > -options.window
  if queries.segment_ids is not None and keys.segment_ids is not None:
    query, key = queries.segment_ids[:, :, None], keys.segment_ids[:, None, :]
    seen = seen & (query == key) & (key != 0)
  return seen


def keep_mask(
  options: Options, keys_B: jax.Array, index_T: jax.Array, shape: tuple
) -> jax.Array:
  """Which probabilities dropout keeps, bool [B, T, *shape].

  A query has a key of its own, so that masks do not depend on how queries
  are cut into chunks.
  """

  def row(key, index):
    key = jax.random.fold_in(key, index)
    return jax.random.bernoulli(key, 1.0 - options.dropout_rate, shape)

  over_queries = jax.vmap(row, in_axes=(None, 0))
  return jax.vmap(over_queries, in_axes=(0, None))(keys_B, index_T)
