"""What an attention call asks for, apart from its large arrays."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Score of a hidden key, and the least maximum and logsumexp of a row: a row
# that sees nothing then has exp(HIDDEN - LEAST) = 0 everywhere.
HIDDEN = -2e38
LEAST = -1e30

Window = int | tuple[int | None, int | None] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """The static part of a call; see `flash_attention` for the meaning.

  Attributes:
    left: a query sees keys at most so many positions before it; None: all.
    right: the same for keys after it; 0 is causal.
    scale: multiplies scores.
    soft_cap: see `flash_attention`.
    dropout_rate: likewise.
    operands: likewise.
    out_dtype: likewise.
  """

  left: int | None
  right: int | None
  scale: float
  soft_cap: float | None
  dropout_rate: float
  operands: str
  out_dtype: str


def sides(causal: bool, window: Window) -> tuple[int | None, int | None]:
  """How many positions before and after its own a query sees."""
  if isinstance(window, tuple):
    left, right = window
    if any(side is not None and side < 0 for side in window):
      raise ValueError(f"both sides of window must be at least 0, got {window}")
  elif window is None:
    left = right = None
  elif window < 1:
    raise ValueError(f"window must be at least 1, got {window}")
  else:
    left = right = window - 1
  return left, 0 if causal else right


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
  if options.right is not None:
    seen &= ahead >= -options.right
  if options.left is not None:
    seen &= ahead <= options.left
  if queries.segment_ids is not None and keys.segment_ids is not None:
    query, key = queries.segment_ids[:, :, None], keys.segment_ids[:, None, :]
    seen = seen & (query == key) & (key != 0)
  return seen
