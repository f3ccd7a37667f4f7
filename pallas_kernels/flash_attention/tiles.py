"""Which tiles of a score matrix hold something, told by a few numbers each.

A tile is a block of queries times a block of keys. Kernels skip those that
the mask empties and leave out the mask of those that it leaves whole, by
comparing the least and greatest position and segment of both blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.options import Options, Rows

FAR = jnp.iinfo(jnp.int32).max


class Ranges(NamedTuple):
  """Of each block of rows: int32 [B, blocks], or scalars of one block.

  Attributes:
    first: least position; None where positions just count up.
    last: greatest position, or None.
    least: least segment id but 0, `FAR` where all are 0; None without.
    greatest: greatest segment id, or None.
    padded: 1 where a row is padding, or None.
  """

  first: jax.Array | None
  last: jax.Array | None
  least: jax.Array | None
  greatest: jax.Array | None
  padded: jax.Array | None


def ranges(rows: Rows, block: int, batch: int, counted: bool) -> Ranges:
  """Of rows whose number is a multiple of `block`.

  Args:
    rows: where they stand.
    block: rows of a block.
    batch: B.
    counted: positions just count up, and are left out.
  """

  def over_blocks(reduce, x):
    x = x.reshape(x.shape[0], -1, block)
    x = reduce(x, axis=-1).astype(jnp.int32)
    return jnp.broadcast_to(x, (batch, x.shape[1]))

  first = last = least = greatest = padded = None
  if not counted:
    first = over_blocks(jnp.min, rows.index)
    last = over_blocks(jnp.max, rows.index)
  ids = rows.segment_ids
  if ids is not None:
    least = over_blocks(jnp.min, jnp.where(ids == 0, FAR, ids))
    greatest = over_blocks(jnp.max, ids)
    padded = over_blocks(jnp.any, ids == 0)
  return Ranges(first, last, least, greatest, padded)


def holds(options: Options, queries: Ranges, keys: Ranges):
  """(some, all): whether queries of a block may see keys of another.

  Args:
    options: the mask.
    queries: scalars of a block of queries.
    keys: scalars of a block of keys.

  Returns:
    bool scalars. `some` may be true of a tile where nothing is seen; `all`
    is true only where everything is.
  """
  some = every = True
  if options.right is not None:
    some &= keys.first <= queries.last + options.right
    every &= keys.last <= queries.first + options.right
  if options.left is not None:
    some &= keys.last >= queries.first - options.left
    every &= keys.first >= queries.last - options.left
  if queries.least is not None:
    some &= keys.least <= queries.greatest
    some &= keys.greatest >= queries.least
    every &= queries.least == queries.greatest
    every &= keys.least == keys.greatest
    every &= queries.least == keys.least
    every &= queries.padded + keys.padded == 0
  return some, every
