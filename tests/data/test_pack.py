"""Packing against its definition: every step of every document once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import pack
from data.tokenized import Example, InMemory

LENGTHS = st.lists(st.integers(0, 40), max_size=60)
PACKINGS = st.sampled_from(["best_fit", "concat", "none"])


def one_by_one(sizes, capacity):
  """Best-fit decreasing as textbooks have it; the room left in each row."""
  rooms = []
  for size in sorted(sizes, reverse=True):
    fitting = [i for i, room in enumerate(rooms) if room >= size]
    if fitting:
      rooms[min(fitting, key=lambda i: rooms[i])] -= size
    else:
      rooms.append(capacity - size)
  return sorted(rooms)


@given(
  sizes=st.lists(st.integers(1, 23), max_size=120), capacity=st.integers(23, 60)
)
def test_best_fit_decreasing_is_the_textbook_one(sizes, capacity):
  counts, numbers = pack.best_fit_decreasing(np.array(sizes, int), capacity)
  assert sorted(numbers.tolist()) == list(range(len(sizes)))
  rows = np.split(np.array(sizes, int)[numbers], np.cumsum(counts)[:-1])
  rooms = sorted(capacity - int(row.sum()) for row in rows if sizes)
  assert rooms == one_by_one(sizes, capacity)


@given(
  lengths=LENGTHS,
  seq_len=st.integers(1, 17),
  packing=PACKINGS,
  window=st.integers(1, 30),
  overlong=st.sampled_from(["split", "drop"]),
)
def test_every_step_is_in_exactly_one_row(
  lengths, seq_len, packing, window, overlong
):
  order = np.random.default_rng(0).permutation(len(lengths))
  plan = pack.plan_packing(
    lengths,
    seq_len,
    packing=packing,
    order=order,
    window=window,
    overlong=overlong,
  )
  steps = [
    (d, t)
    for d, b, s in zip(plan.document, plan.begin, plan.size, strict=True)
    for t in range(b, b + s)
  ]
  taken = [
    d
    for d, n in enumerate(lengths)
    if n >= 2 and (overlong == "split" or n <= seq_len + 1)
  ]
  assert sorted(steps) == [(d, t) for d in taken for t in range(lengths[d] - 1)]
  assert plan.num_dropped == len(lengths) - len(taken)
  assert (plan.size >= 1).all()
  assert plan.row_offsets[0] == 0 and plan.row_offsets[-1] == len(plan.size)
  used = [
    plan.size[a:b].sum()
    for a, b in zip(plan.row_offsets, plan.row_offsets[1:], strict=False)
  ]
  assert all(0 < u <= seq_len for u in used)
  assert plan.num_rows == len(used)
  if packing == "concat":
    assert all(u == seq_len for u in used[:-1])
  if packing == "none":
    assert len(plan.size) == plan.num_rows
  else:  # whole documents are cut only where they must be
    whole = [d for d in taken if lengths[d] <= seq_len + 1]
    if packing == "best_fit":
      assert all((plan.document == d).sum() == 1 for d in whole)


def examples(lengths, masks=True):
  """Every token is unique: 100 x document + place."""
  rng = np.random.default_rng(1)
  return [
    Example(
      f"d{i}",
      [100 * i + t for t in range(n)],
      rng.random(n) < 0.5 if masks else None,
    )
    for i, n in enumerate(lengths)
  ]


@given(
  lengths=LENGTHS.filter(any),
  seq_len=st.integers(1, 17),
  packing=PACKINGS,
  masks=st.booleans(),
)
def test_rows_hold_shifted_targets_restarting_positions_and_masks(
  lengths, seq_len, packing, masks
):
  docs = examples(lengths, masks)
  data = InMemory(docs)
  plan = pack.plan_packing(lengths, seq_len, packing=packing)
  batch = pack.empty_batch(plan.num_rows, seq_len)
  every = np.arange(plan.num_rows)
  documents = pack.fill(batch, every, plan, every, data) if len(every) else []
  assert {k: v.dtype.name for k, v in batch.items()} == {
    "tokens": "int32",
    "targets": "int32",
    "positions": "int32",
    "segment_ids": "int32",
    "loss_weights": "float32",
  }
  for row in range(plan.num_rows):
    segment = batch["segment_ids"][row]
    filled = segment > 0
    # Segments count 1, 2, ... from the left, padding is on the right.
    assert (np.diff(segment[filled]) >= 0).all() and not filled[
      filled.sum() :
    ].any()
    assert segment.max() == len(documents[row])
    for number, document in enumerate(documents[row], 1):
      here = np.flatnonzero(segment == number)
      tokens = batch["tokens"][row, here]
      np.testing.assert_array_equal(tokens // 100, document)
      np.testing.assert_array_equal(batch["targets"][row, here], tokens + 1)
      np.testing.assert_array_equal(
        batch["positions"][row, here], np.arange(len(here))
      )
      wanted = 1.0
      if masks:  # a weight belongs to the token that is predicted
        wanted = np.asarray(docs[document].mask)[tokens % 100 + 1]
      np.testing.assert_array_equal(batch["loss_weights"][row, here], wanted)
    for name in batch:
      assert not batch[name][row, ~filled].any()


def test_rows_by_hand():
  data = InMemory([Example("a", [1, 2, 3]), Example("b", [4, 5, 6, 7, 8, 9])])
  plan = pack.plan_packing(np.diff(data.offsets), 4, packing="concat")
  batch = pack.empty_batch(2, 4)
  pack.fill(batch, np.array([0, 1]), plan, np.array([0, 1]), data)
  assert batch["tokens"].tolist() == [[1, 2, 4, 5], [6, 7, 8, 0]]
  assert batch["targets"].tolist() == [[2, 3, 5, 6], [7, 8, 9, 0]]
  assert batch["positions"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 0]]
  assert batch["segment_ids"].tolist() == [[1, 1, 2, 2], [1, 1, 1, 0]]
  assert batch["loss_weights"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


def test_a_row_takes_one_token_more_than_it_has_positions():
  # The last token is only a target.
  plan = pack.plan_packing([5, 6, 1], 4, overlong="drop")
  assert plan.document.tolist() == [0] and plan.num_dropped == 2
  plan = pack.plan_packing([5, 6, 1], 4, packing="none")
  pieces = zip(plan.document, plan.begin, plan.size, strict=True)
  assert list(pieces) == [(0, 0, 4), (1, 0, 4), (1, 4, 1)]
  assert plan.num_dropped == 1


def test_rows_can_go_anywhere_in_a_batch():
  lengths = [3, 9, 4, 2, 7]
  data = InMemory(examples(lengths))
  plan = pack.plan_packing(lengths, 8)
  whole = pack.empty_batch(plan.num_rows, 8)
  every = np.arange(plan.num_rows)
  pack.fill(whole, every, plan, every, data)
  moved = pack.empty_batch(plan.num_rows + 1, 8)
  pack.fill(moved, every[::-1] + 1, plan, every, data)
  for name in whole:
    np.testing.assert_array_equal(moved[name][:0:-1], whole[name])
    assert not moved[name][0].any()


def test_best_fit_wastes_little():
  lengths = np.random.default_rng(0).lognormal(6, 1.2, 20_000).astype(int) + 2
  assert pack.plan_packing(lengths, 2048).efficiency > 0.999
  unpacked = pack.plan_packing(lengths, 2048, packing="none").efficiency
  assert unpacked < 0.5


def test_pairs_are_interleaved():
  chosen, rejected = examples([4, 3]), examples([2, 5])
  batch = pack.pair_rows(chosen, rejected, seq_len=6)
  for row, example in enumerate(
    [chosen[0], rejected[0], chosen[1], rejected[1]]
  ):
    n = len(example.tokens) - 1
    assert batch["tokens"][row, :n].tolist() == list(example.tokens[:-1])
    assert batch["targets"][row, :n].tolist() == list(example.tokens[1:])
    assert batch["segment_ids"][row].tolist() == [1] * n + [0] * (6 - n)
    assert batch["loss_weights"][row, :n].tolist() == list(example.mask[1:])


def test_errors():
  with pytest.raises(ValueError, match="2 chosen but 1 rejected"):
    pack.pair_rows(examples([3, 3]), examples([3]), seq_len=4)
  with pytest.raises(ValueError, match="'d1' has 7 tokens.*raise.*seq_len"):
    pack.rows_of(examples([3, 7]), seq_len=5)
  with pytest.raises(ValueError, match="seq_len must be at least 1"):
    pack.plan_packing([3], 0)
  with pytest.raises(ValueError, match="packing must be"):
    pack.plan_packing([3], 4, packing="first_fit")
  with pytest.raises(ValueError, match="overlong must be"):
    pack.plan_packing([3], 4, overlong="truncate")
