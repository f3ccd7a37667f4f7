"""What the forward and the backward kernel share: masks, and the tile walk."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention import dropout, tiles
from pallas_kernels.flash_attention.options import HIDDEN, Options, Rows

LANES = 128
LOG2_E = math.log2(math.e)
NN = (((1,), (0,)), ((), ()))  # x y
NT = (((1,), (1,)), ((), ()))  # x y^T
TN = (((0,), (0,)), ((), ()))  # x^T y


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """How the work is cut, and what of it is known when compiling.

  Attributes:
    options: what is asked.
    block_q: queries of a tile.
    block_k: keys of a tile.
    step: height of the steps in which tiles on the diagonal follow it;
      divides both blocks.
    chunk_k: keys that lie in fast memory at a time; a multiple of `block_k`.
    offset: position of the first query where positions just count up, those
      of keys from 0; None: they are arrays.
    num_keys: how many keys are real; those after are there to fill a tile.
    segmented: whether there are segment ids.
  """

  options: Options
  block_q: int
  block_k: int
  step: int
  chunk_k: int
  offset: int | None
  num_keys: int
  segmented: bool

  @property
  def filled(self) -> bool:
    """Whether there may be keys that are not real."""
    return self.num_keys % self.chunk_k != 0

  @property
  def tiles_a_chunk(self) -> int:
    return self.chunk_k // self.block_k

  @property
  def stairs(self) -> bool:
    """Whether each row of tiles ends in one cut from corner to corner."""
    aligned = self.offset == 0 and self.block_q == self.block_k
    return aligned and self.options.right == 0


class Side(NamedTuple):
  """What a kernel knows of queries or keys beside their vectors.

  Arrays outside of the kernel, references in it.

  Attributes:
    index: int32 [1 or B, 1, T]; None where positions just count up.
    segment_ids: int32 [B, 1, T], or None.
    words: uint32 [B, N, 2, T] of dropout, for queries; or None.
  """

  index: jax.Array | None
  segment_ids: jax.Array | None
  words: jax.Array | None = None


class Part(NamedTuple):
  """Where the rows or columns of a (part of a) tile stand.

  Arrays that broadcast against each other: [R, 1] and [1, C].

  Attributes:
    slot: int32, their number.
    index: int32, their position.
    segment_ids: int32, or None.
    words: a pair of uint32, or None.
  """

  slot: jax.Array
  index: jax.Array
  segment_ids: jax.Array | None
  words: tuple | None = None


def side(plan: Plan, rows: Rows, words=None) -> Side:
  """Of rows whose number is a multiple of the block."""
  row = lambda x: None if x is None else x[:, None]
  index = row(rows.index) if plan.offset is None else None
  return Side(index, row(rows.segment_ids), words)


def part_of_row(
  refs: Side, here: pl.Slice, first: int, offset: int | None
) -> Part:
  """A part [1, R] of a row of numbers that a kernel was given.

  Args:
    refs: of arrays cut to [1, 1, R'], words to [1, 1, 2, R'].
    here: where in the references.
    first: number of their first.
    offset: position of number 0, where positions just count up.
  """
  slot = jax.lax.broadcasted_iota(jnp.int32, (1, here.size), 1)
  slot = slot + (first + here.start)
  index = slot + offset if refs.index is None else refs.index[0, :, here]
  ids = words = None
  if refs.segment_ids is not None:
    ids = refs.segment_ids[0, :, here]
  if refs.words is not None:
    words = refs.words[0, 0, :1, here], refs.words[0, 0, 1:, here]
  return Part(slot, index, ids, words)


def product(operands: str):
  """`dot_general` that accumulates in float32 what it is given."""
  precision = jax.lax.Precision.HIGHEST if operands == "float32" else None
  return functools.partial(
    jax.lax.dot_general,
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def to_columns(row: jax.Array) -> jax.Array:
  """[1, R] -> [R, LANES], the same in all lanes."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def capped(plan: Plan, products: jax.Array):
  """Scores in units of log 2, of products of queries and keys.

  Returns:
    The scores, and their tanh where there is a cap, else None.
  """
  scale, cap = plan.options.scale, plan.options.soft_cap
  if cap is None:
    return products * (scale * LOG2_E), None
  tanh = jnp.tanh(products * (scale / cap))
  return tanh * (cap * LOG2_E), tanh


def hidden(plan: Plan, queries: Part, keys: Part, scores: jax.Array):
  """Scores with those that the mask hides at `HIDDEN`."""
  options = plan.options
  ahead = queries.index - keys.index
  seen = []
  if options.right is not None:
    seen.append(ahead >= -options.right)
  if options.left is not None:
    seen.append(ahead <= options.left)
  if plan.segmented:
    seen.append(queries.segment_ids == keys.segment_ids)
    seen.append(keys.segment_ids != 0)
  if plan.filled:
    seen.append(keys.slot < plan.num_keys)
  for condition in seen:
    scores = jnp.where(condition, scores, HIDDEN)
  return scores


def dropped(plan: Plan, queries: Part, keys: Part, weights: jax.Array):
  """Weights after dropout, if there is any."""
  if queries.words is None:
    return weights
  rate = plan.options.dropout_rate
  return dropout.drop(weights, queries.words, keys.index, rate)


class Tile(NamedTuple):
  """A tile, or a strip of one on the diagonal.

  Attributes:
    number: of the tile in its chunk.
    rows: queries of the block.
    cols: keys of the tile.
    masked: how many of the keys, the last ones, need the mask.
  """

  number: jax.Array
  rows: slice
  cols: slice
  masked: int

  def keys(self, plan: Plan, last: int | None = None) -> pl.Slice:
    """Its keys, or the last few of them, within the chunk."""
    size = self.cols.stop - self.cols.start
    last = size if last is None else last
    start = self.number * plan.block_k + self.cols.stop - last
    if plan.block_k % LANES == 0:
      start = pl.multiple_of(start, LANES)
    return pl.ds(start, last)

  @property
  def queries(self) -> pl.Slice:
    """Its queries within the block."""
    return pl.ds(self.rows.start, self.rows.stop - self.rows.start)


def walk(plan: Plan, scalars, batch, block, chunk, visit) -> None:
  """Visits each tile of a block of queries and a chunk that holds something.

  Args:
    plan: how the work is cut.
    scalars: `tiles.Ranges` of queries and of keys, references.
    batch: number of the batch row.
    block: number of the block of queries.
    chunk: number of the chunk of keys.
    visit: of a `Tile`.
  """
  options, per_chunk = plan.options, plan.tiles_a_chunk
  q_ranges, k_ranges = scalars
  read = lambda refs, at: jax.tree.map(lambda ref: ref[batch, at], refs)
  queries = read(q_ranges, block)
  rows, cols = slice(0, plan.block_q), slice(0, plan.block_k)
  first, last = 0, per_chunk
  if plan.offset is not None:
    start = block * plan.block_q + plan.offset
    queries = queries._replace(first=start, last=start + plan.block_q - 1)
    if options.right is not None:
      # The number of tiles that begin at or before the last key seen.
      reach = jnp.maximum(queries.last + options.right, -1)
      end = jax.lax.div(reach + plan.block_k, plan.block_k)
      last = jnp.clip(end - chunk * per_chunk, 0, per_chunk)
    if options.left is not None:
      least = jnp.maximum(queries.first - options.left, 0)
      least = jax.lax.div(least, plan.block_k)
      first = jnp.clip(least - chunk * per_chunk, 0, per_chunk)
  diagonal = block - chunk * per_chunk
  if plan.stairs:
    last = jnp.minimum(last, diagonal)

  def holds(number):
    """See `tiles.holds`."""
    at = chunk * per_chunk + number
    keys = read(k_ranges, at)
    if plan.offset is not None:
      start = at * plan.block_k
      keys = keys._replace(first=start, last=start + plan.block_k - 1)
    some, every = tiles.holds(options, queries, keys)
    if plan.filled:
      some &= at * plan.block_k < plan.num_keys
      every &= (at + 1) * plan.block_k <= plan.num_keys
    return some, every

  def body(number, _):
    whole = Tile(number, rows, cols, 0)
    if plan.stairs and options.left is None and not plan.segmented:
      visit(whole)
      return
    some, every = holds(number)
    pl.when(every)(lambda: visit(whole))
    if every is not True:
      partly = jnp.logical_and(some, jnp.logical_not(every))
      masked = whole._replace(masked=plan.block_k)
      pl.when(partly)(lambda: visit(masked))

  jax.lax.fori_loop(first, last, body, None)
  if not plan.stairs:
    return

  def descend():
    for top in range(0, plan.block_q, plan.step):
      stop = top + plan.step
      causal_only = options.left is None and not plan.segmented
      masked = plan.step if causal_only else stop
      visit(Tile(diagonal, slice(top, stop), slice(0, stop), masked))

  here = jnp.logical_and(diagonal >= 0, diagonal < per_chunk)
  if plan.segmented:
    # A block beyond the chunk has no ranges of keys to read.
    some, _ = holds(jnp.clip(diagonal, 0, per_chunk - 1))
    here = jnp.logical_and(here, some)
  pl.when(here)(descend)
