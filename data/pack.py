"""Documents -> rows of T positions, planned from lengths alone.

A document of n tokens has n - 1 steps (token -> next token); a row holds T
steps. Labels are shifted here and nowhere else: a position holds a token and
the token to predict after it, so the last token of a document is only ever a
target and no position looks across a border. A document of more than T steps
is cut into pieces; the last target of one piece is the first token of the
next, so each step of each document is in exactly one row.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from data.tokenized import Example, InMemory, Tokenized

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Plan:
  """Which piece of which document goes where.

  Attributes:
    seq_len: T.
    row_offsets: int64 [R + 1]: row r holds the pieces
      row_offsets[r] : row_offsets[r + 1], side by side from position 0.
    document: int64 [pieces].
    begin: int64 [pieces], first token of the piece within its document.
    size: int64 [pieces], positions; it reads size + 1 tokens.
    num_dropped: documents left out: too long under overlong="drop", or of
      fewer than two tokens (nothing to predict).
  """

  seq_len: int
  row_offsets: np.ndarray
  document: np.ndarray
  begin: np.ndarray
  size: np.ndarray
  num_dropped: int = 0

  @property
  def num_rows(self) -> int:
    return len(self.row_offsets) - 1

  @property
  def efficiency(self) -> float:
    """Share of positions that hold a token."""
    return float(self.size.sum()) / max(1, self.num_rows * self.seq_len)


def plan_packing(
  lengths: np.ndarray,
  seq_len: int,
  *,
  packing: str = "best_fit",
  order: np.ndarray | None = None,
  window: int = 65_536,
  overlong: str = "split",
) -> Plan:
  """Plans all rows of a data set; a pure function of its arguments.

  Args:
    lengths: int64 [N], tokens of each document.
    seq_len: T.
    packing: "best_fit": best-fit decreasing over whole documents; "concat":
      documents end to end, cut every T positions; "none": one piece a row.
    order: int64, document numbers in the order in which they are taken;
      None: 0, 1, ...
    window: documents that best-fit packs together.
    overlong: "split" or "drop" documents of more than T steps.

  Returns:
    The plan; every step of every document not dropped is in exactly one row.
  """
  if seq_len < 1:
    raise ValueError(f"seq_len must be at least 1, got {seq_len}")
  if packing not in ("best_fit", "concat", "none"):
    raise ValueError(
      f"packing must be 'best_fit', 'concat' or 'none', got {packing!r}"
    )
  if overlong not in ("split", "drop"):
    raise ValueError(f"overlong must be 'split' or 'drop', got {overlong!r}")
  lengths = np.asarray(lengths, np.int64)
  order = np.arange(len(lengths)) if order is None else np.asarray(order)
  fits = lengths[order] >= 2
  if overlong == "drop":
    fits &= lengths[order] <= seq_len + 1
  taken = order[fits]
  if packing == "concat":
    row_offsets, pieces = _concat(taken, lengths[taken] - 1, seq_len)
  else:
    pieces = _cut(taken, lengths[taken] - 1, seq_len)
    row_offsets = np.arange(len(pieces[0]) + 1)
    if packing == "best_fit":
      row_offsets, chosen = _best_fit_windows(pieces[2], seq_len, window)
      pieces = tuple(p[chosen] for p in pieces)
  document, begin, size = pieces
  return Plan(
    seq_len=seq_len,
    row_offsets=row_offsets,
    document=document,
    begin=begin,
    size=size,
    num_dropped=len(order) - len(taken),
  )


def ranges(counts: np.ndarray) -> np.ndarray:
  """0 .. counts[0] - 1, 0 .. counts[1] - 1, ... end to end."""
  ends = np.cumsum(counts)
  return np.arange(ends[-1] if len(ends) else 0) - np.repeat(
    ends - counts, counts
  )


def _cut(document, steps, seq_len):
  """Pieces (document, begin, size) of at most seq_len steps."""
  counts = -(-steps // seq_len)
  begin = ranges(counts) * seq_len
  size = np.minimum(np.repeat(steps, counts) - begin, seq_len)
  return np.repeat(document, counts), begin, size


def _concat(document, steps, seq_len):
  """Pieces of the stream of all steps, cut at documents and at rows."""
  ends = np.cumsum(steps)
  total = int(ends[-1]) if len(ends) else 0
  num_rows = -(-total // seq_len)
  borders = np.union1d(ends, np.arange(1, num_rows) * seq_len)
  starts = np.concatenate([[0], borders])[:-1].astype(np.int64)
  which = np.searchsorted(ends, starts, side="right")
  begin = starts - (ends - steps)[which]
  row_offsets = np.searchsorted(starts, np.arange(num_rows + 1) * seq_len)
  return row_offsets, (document[which], begin, borders - starts)


def _best_fit_windows(sizes, seq_len, window):
  """Packs pieces window by window; returns (row_offsets, piece numbers)."""
  counts, chosen = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
  for start in range(0, len(sizes), window):
    row_counts, numbers = best_fit_decreasing(
      sizes[start : start + window], seq_len
    )
    counts.append(row_counts)
    chosen.append(numbers + start)
  return np.cumsum(np.concatenate(counts)), np.concatenate(chosen)


def best_fit_decreasing(
  sizes: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
  """Longest first, each into the fullest row that still has room.

  Works on the histogram of sizes rather than item by item, as the packers of
  Krell et al. (arXiv:2107.02027) do, so time hardly depends on the number of
  items. Rows of equal content are one group (count, content); content is a
  linked list (rest, size, times).

  Args:
    sizes: int64 [n], each in [1, capacity].
    capacity: of a row.

  Returns:
    (row_counts, numbers): items of each row [R], and the item numbers row
    after row [n].
  """
  sizes = np.asarray(sizes, np.int64)
  by_size = np.argsort(-sizes, kind="stable")
  distinct, how_many = np.unique(sizes, return_counts=True)
  groups = {}  # room left -> [(number of rows, content)]
  rooms = 0  # bit r is set where groups[r] has any

  def put(room, count, content):
    nonlocal rooms
    groups.setdefault(room, []).append((count, content))
    rooms |= 1 << room

  for size, left in zip(
    distinct[::-1].tolist(), how_many[::-1].tolist(), strict=True
  ):
    while left:
      fitting = rooms >> size
      if fitting:
        room = size + (fitting & -fitting).bit_length() - 1
        count, content = groups[room].pop()
        if not groups[room]:
          rooms ^= 1 << room
      else:
        room, count, content = capacity, left, None  # as many as needed
      times = room // size  # items that one of these rows takes
      full = min(count, left // times)
      rest = left % times if full < count else 0
      untouched = count - full - bool(rest)
      if full:
        put(room - size * times, full, (content, size, times))
      if rest:
        put(room - size * rest, 1, (content, size, rest))
      if untouched and content is not None:
        put(room, untouched, content)
      left -= full * times + rest
  return _place(groups, distinct, how_many, by_size)


def _place(groups, distinct, how_many, by_size):
  """Gives the rows of each group their items, longest first."""
  starts = np.cumsum(how_many[::-1]) - how_many[::-1]
  next_item = dict(zip(distinct[::-1].tolist(), starts.tolist(), strict=True))
  counts, numbers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
  for same_room in groups.values():
    for rows, content in same_room:
      parts = []
      while content is not None:
        content, size, times = content
        first = next_item[size]
        next_item[size] += rows * times
        items = by_size[first : first + rows * times]
        parts.append(items.reshape(rows, times))
      block = np.concatenate(parts[::-1], axis=1)
      counts.append(np.full(rows, block.shape[1], np.int64))
      numbers.append(block.ravel())
  return np.concatenate(counts), np.concatenate(numbers)


def empty_batch(num_rows: int, seq_len: int) -> Batch:
  """All padding: segment 0, weight 0."""
  shape = (num_rows, seq_len)
  batch = {
    name: np.zeros(shape, np.int32)
    for name in ("tokens", "targets", "positions", "segment_ids")
  }
  return batch | {"loss_weights": np.zeros(shape, np.float32)}


def fill(
  batch: Batch, at: np.ndarray, plan: Plan, rows: np.ndarray, data: Tokenized
) -> list[np.ndarray]:
  """Writes rows of a plan into rows of a batch.

  Args:
    batch: [B, T] arrays of `empty_batch`, written in place.
    at: int64 [k], rows of the batch.
    plan: of `data`.
    rows: int64 [k], rows of the plan.
    data: where the tokens are.

  Returns:
    For each of the k rows the document numbers in it, in order.
  """
  counts = plan.row_offsets[rows + 1] - plan.row_offsets[rows]
  in_row = ranges(counts)
  piece = np.repeat(plan.row_offsets[rows], counts) + in_row
  document, size = plan.document[piece], plan.size[piece]
  first_token = data.offsets[document] + plan.begin[piece]
  # Pieces lie side by side: each starts where the sizes before it end.
  ends = np.cumsum(size)
  before_row = (ends - size)[np.cumsum(counts) - counts]
  start = ends - size - np.repeat(before_row, counts)
  start += np.repeat(at, counts) * plan.seq_len

  within = ranges(size)
  to = np.repeat(start, size) + within
  source = np.repeat(first_token, size) + within
  batch["tokens"].ravel()[to] = data.tokens[source]
  batch["targets"].ravel()[to] = data.tokens[source + 1]
  batch["positions"].ravel()[to] = within
  batch["segment_ids"].ravel()[to] = np.repeat(in_row + 1, size)
  batch["loss_weights"].ravel()[to] = (
    1.0 if data.mask is None else data.mask[source + 1]
  )
  return np.split(document, np.cumsum(counts)[:-1])


def rows_of(examples: Sequence[Example], *, seq_len: int) -> Batch:
  """One example a row, in order, padded on the right.

  Returns:
    A batch of [len(examples), seq_len] arrays.

  Raises:
    ValueError: an example has fewer than 2 or more than seq_len + 1 tokens.
  """
  for example in examples:
    if not 2 <= len(example.tokens) <= seq_len + 1:
      raise ValueError(
        f"document {example.id!r} has {len(example.tokens)} tokens; a row of"
        f" seq_len={seq_len} takes 2 to {seq_len + 1}: filter it out or raise"
        " seq_len"
      )
  data = InMemory(examples)
  plan = plan_packing(np.diff(data.offsets), seq_len, packing="none")
  batch = empty_batch(len(examples), seq_len)
  every = np.arange(len(examples))
  fill(batch, every, plan, every, data)
  return batch


def pair_rows(
  chosen: Sequence[Example], rejected: Sequence[Example], *, seq_len: int
) -> Batch:
  """Preference pairs as rows [chosen 0, rejected 0, chosen 1, ...].

  Args:
    chosen: preferred conversations; their masks mark the answers.
    rejected: the other answers, pair by pair.
    seq_len: T.

  Returns:
    A batch of [2 x pairs, seq_len] arrays, one conversation a row.
  """
  if len(chosen) != len(rejected):
    raise ValueError(
      f"{len(chosen)} chosen but {len(rejected)} rejected conversations: they"
      " come in pairs"
    )
  interleaved = [e for pair in zip(chosen, rejected, strict=True) for e in pair]
  return rows_of(interleaved, seq_len=seq_len)
