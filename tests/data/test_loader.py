"""The order of data: the same for any hosts, threads and interruptions."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import loader, tokenized
from data.config import DataConfig, TokenSource
from data.loader import Loader
from data.tokenized import Example, InMemory


def dataset(n, start=0, seed=0, mask=False):
  """Documents of 2 to 29 tokens, every token unique."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(2, 30, n)
  first = start + np.cumsum(lengths) - lengths
  return InMemory(
    Example(f"{start}+{i}", range(f, f + k), [True] * k if mask else None)
    for i, (f, k) in enumerate(zip(first, lengths, strict=True))
  )


ONE, TWO = dataset(97), dataset(41, start=10_000, seed=1)
SETTINGS = dict(seq_len=24, global_batch_size=8, weights=[0.75, 0.25])


def assert_equal(a, b):
  assert a[1] == b[1]
  assert a[0].keys() == b[0].keys()
  for name in a[0]:
    np.testing.assert_array_equal(a[0][name], b[0][name])


def steps_in(batch):
  """The (token -> target) steps in a batch."""
  filled = batch["segment_ids"] > 0
  return list(
    zip(batch["tokens"][filled], batch["targets"][filled], strict=True)
  )


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_together_read_the_global_batch(packing, hosts):
  whole = Loader([ONE, TWO], packing=packing, **SETTINGS)
  size = 8 // hosts
  parts = [
    Loader(
      [ONE, TWO],
      packing=packing,
      rows=slice(h * size, (h + 1) * size),
      **SETTINGS,
    )
    for h in range(hosts)
  ]
  for step in (0, 1, 7, 1000):  # far past an epoch as well
    batch, ids = whole.batch(step)
    read = [part.batch(step) for part in parts]
    joined = {
      name: np.concatenate([b[name] for b, _ in read]) for name in batch
    }
    assert_equal((batch, ids), (joined, [r for _, i in read for r in i]))


def test_batch_does_not_depend_on_what_was_read_before():
  fresh = Loader([ONE, TWO], **SETTINGS)
  used = Loader([ONE, TWO], **SETTINGS)
  for step in (5, 3, 3, 12):
    used.batch(step)
  for step in (12, 0, 3):
    assert_equal(fresh.batch(step), used.batch(step))


@pytest.mark.parametrize("threads, ahead", [(0, 0), (1, 1), (4, 16)])
def test_prefetch_and_resume_change_nothing(threads, ahead):
  data = Loader(
    [ONE, TWO], prefetch_threads=threads, prefetch_batches=ahead, **SETTINGS
  )
  for start in (0, 5, 23):
    got = list(itertools.islice(data.iterate(start), 6))
    assert [step for step, _, _ in got] == list(range(start, start + 6))
    for step, batch, ids in got:
      assert_equal((batch, ids), data.batch(step))


@given(
  batch_size=st.integers(1, 9),
  packing=st.sampled_from(["best_fit", "concat"]),
  seed=st.integers(0, 9),
)
def test_an_epoch_holds_every_step_once(batch_size, packing, seed):
  data = Loader(
    ONE,
    seq_len=24,
    global_batch_size=batch_size,
    packing=packing,
    seed=seed,
    num_epochs=2,
  )
  batches = [data.batch(s)[0] for s in range(data.num_batches)]
  seen = [step for batch in batches for step in steps_in(batch)]
  every = [
    (t, t + 1)
    for a, b in itertools.pairwise(ONE.offsets)
    for t in range(a, b - 1)
  ]
  assert sorted(seen) == sorted(2 * every)
  # One epoch is done before the next begins.
  rows = np.concatenate([b["tokens"] for b in batches])[: data.num_rows[0]]
  first = np.concatenate([b["segment_ids"] for b in batches])[
    : data.num_rows[0]
  ]
  assert sorted(rows[first > 0]) == sorted(t for t, _ in every)


def test_epochs_and_seeds_have_their_own_order():
  def rows(seed, epoch):
    data = Loader(ONE, seq_len=24, global_batch_size=1, seed=seed)
    n = data.num_rows[0]
    return [
      tuple(data.batch(step)[1][0]) for step in range(epoch * n, epoch * n + n)
    ]

  assert rows(0, 0) != rows(0, 1) and set(rows(0, 0)) == set(rows(0, 1))
  assert set(rows(0, 0)) != set(rows(1, 0))  # packed anew


def test_document_ids_are_those_of_the_tokens():
  batch, ids = Loader([ONE, TWO], **SETTINGS).batch(2)
  for row in range(8):
    for segment, name in enumerate(ids[row], 1):
      tokens = batch["tokens"][row, batch["segment_ids"][row] == segment]
      data = TWO if name.startswith("10000+") else ONE
      document = int(name.split("+")[1])
      begin, end = data.offsets[document : document + 2]
      assert np.isin(tokens, data.tokens[begin:end]).all()
    assert batch["segment_ids"][row].max() == len(ids[row])


def test_mixture_follows_the_weights():
  data = Loader([ONE, TWO], **SETTINGS)
  from_two = sum(
    row[0].startswith("10000+") for s in range(50) for row in data.batch(s)[1]
  )
  assert abs(from_two - 0.25 * 400) <= 2


def test_state_is_a_function_of_the_step():
  data = Loader([ONE, TWO], **SETTINGS)
  assert data.state(0) == {"epoch": [0, 0], "row": [0, 0]}
  for step in (1, 9, 200):
    state = data.state(step)
    rows = [
      e * n + r
      for e, n, r in zip(
        state["epoch"], data.num_rows, state["row"], strict=True
      )
    ]
    read = [row[0] for s in range(step) for row in data.batch(s)[1]]
    two = sum(name.startswith("10000+") for name in read)
    assert rows == [8 * step - two, two]
    assert all(
      0 <= r < n for r, n in zip(state["row"], data.num_rows, strict=True)
    )


def test_evaluation_reads_once_in_order():
  data = Loader(
    ONE,
    seq_len=32,
    global_batch_size=8,
    packing="none",
    shuffle=False,
    num_epochs=1,
  )
  assert data.num_batches == 13  # 97 documents of at most 29 tokens
  ids = [row for _, _, ids in data.iterate() for row in ids]
  assert ids == [[f"0+{i}"] for i in range(97)] + [[]] * 7
  last, _ = data.batch(12)
  assert not any(array[1:].any() for array in last.values())
  with pytest.raises(IndexError, match="step 13 of 13"):
    data.batch(13)
  assert not list(data.iterate(13))


def test_masks_become_weights():
  masked = InMemory([Example("a", [1, 2, 3, 4], [False, True, False, True])])
  batch, _ = Loader(masked, seq_len=5, global_batch_size=1).batch(0)
  assert batch["loss_weights"].tolist() == [[1, 0, 1, 0, 0]]


def test_open_loader_checks_the_tokenizer(tmp_path, trained):
  for name, fingerprint in (("a", trained.fingerprint), ("b", "other")):
    tokenized.write(
      tmp_path / name,
      [Example("x", [1, 2, 3])],
      vocab_size=1000,
      fingerprint=fingerprint,
    )

  def config(*names):
    return DataConfig(
      sources=tuple(TokenSource(path=str(tmp_path / n)) for n in names),
      tokenizer="unused",
      seq_len=4,
      global_batch_size=2,
    )

  batch, ids = loader.open_loader(config("a"), trained).batch(0)
  assert ids == [["x"], ["x"]] and batch["tokens"].shape == (2, 4)
  with pytest.raises(ValueError, match="b' was written by a tokenizer with"):
    loader.open_loader(config("a", "b"), trained)
  with pytest.raises(ValueError, match="data.sources is empty"):
    loader.open_loader(config(), trained)


@pytest.mark.parametrize(
  "change, message",
  [
    ({"weights": [1.0]}, "1 weights for 2 data sets"),
    ({"global_batch_size": 0}, "global_batch_size must be at least 1"),
    ({"num_epochs": 1}, "num_epochs=1 needs one data set"),
    ({"rows": slice(0, 8, 2)}, "neighbouring rows of the 8"),
    ({"rows": slice(8, 16)}, "neighbouring rows of the 8"),
    ({"seq_len": 1, "overlong": "drop"}, "data set 1 gives no row"),
  ],
)
def test_errors(change, message):
  long = InMemory([Example("a", range(9))])
  with pytest.raises(ValueError, match=message):
    Loader([ONE, long], **SETTINGS | change)
