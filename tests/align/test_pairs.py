"""Pairs: read with their mistakes named, batched by (seed, step) alone."""

import collections
import json

import numpy as np
import pytest

from align import pairs as pairs_lib
from data import tokenizer as tokenizer_lib
from data.chat import DEFAULT_TEMPLATE, ChatTemplate
from data.report import Report
from tests.align import tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  return tokenizer_lib.load(tiny.tokenizer(tmp_path_factory.mktemp("t")))


def read(path, tokenizer, **changes):
  report = Report("pairs")
  values = {"seq_len": 32, "report": report} | changes
  template = ChatTemplate(DEFAULT_TEMPLATE)
  return pairs_lib.read_pairs(path, tokenizer, template, **values), report


def test_masks_cover_the_answer_and_its_end(tmp_path, tokenizer):
  path = tiny.write(tmp_path / "p.jsonl", tiny.lines(1))
  (pair,), report = read(path, tokenizer)
  assert pair.id == "pair-0" and report.kept == 1
  for side, answer in ((pair.chosen, "north"), (pair.rejected, "south")):
    marked = [t for t, m in zip(side.tokens, side.mask, strict=True) if m]
    text = tokenizer.decode(marked, skip_special=False)
    assert text == f"{answer}<|end|>"
    whole = tokenizer.decode(side.tokens, skip_special=False)
    assert whole == f"<s><|user|>go north<|end|><|assistant|>{text}"


def test_earlier_answers_of_a_conversation_do_not_count(tmp_path, tokenizer):
  prompt = [
    {"role": "user", "content": "go up"},
    {"role": "assistant", "content": "up"},
    {"role": "user", "content": "go west"},
  ]
  line = {"prompt": prompt, "chosen": "west", "rejected": "down"}
  (pair,), _ = read(tiny.write(tmp_path / "p.jsonl", [line]), tokenizer)
  chosen = pair.chosen
  marked = [t for t, m in zip(chosen.tokens, chosen.mask, strict=True) if m]
  assert tokenizer.decode(marked, skip_special=False) == "west<|end|>"


@pytest.mark.parametrize(
  "line",
  [
    {"prompt": "go up", "chosen": "up"},
    {"prompt": "go up", "chosen": "up", "rejected": ["down"]},
    {"chosen": "up", "rejected": "down"},
    {"prompt": "go up", "rejected": "down"},
  ],
)
def test_bad_line_is_named_or_skipped(tmp_path, tokenizer, line):
  lines = [tiny.lines(1)[0], line, tiny.lines(2)[1]]
  path = tiny.write(tmp_path / "p.jsonl", lines)
  with pytest.raises(ValueError, match=r"p\.jsonl.*2"):
    read(path, tokenizer)
  found, report = read(path, tokenizer, on_bad_line="skip")
  assert [p.id for p in found] == ["pair-0", "pair-1"]
  assert list(report.removed) == ["bad line"] and report.num_removed == 1


def test_long_pairs_are_counted(tmp_path, tokenizer):
  lines = tiny.lines(2)
  lines[0]["rejected"] = "north " * 40
  path = tiny.write(tmp_path / "p.jsonl", lines)
  found, report = read(path, tokenizer)
  assert [p.id for p in found] == ["pair-1"]
  assert report.removed == {"longer than 33 tokens": ["pair-0"]}
  with pytest.raises(ValueError, match="no usable pair"):
    read(path, tokenizer, seq_len=3)


@pytest.fixture(scope="module")
def found(tmp_path_factory, tokenizer):
  path = tmp_path_factory.mktemp("p") / "p.jsonl"
  return read(tiny.write(path, tiny.lines(10)), tokenizer)[0]


def batches(found, rows=slice(0, 8), scores=None, seed=3):
  return pairs_lib.PairBatches(
    found, scores, seq_len=32, global_batch_size=4, rows=rows, seed=seed
  )


def test_every_pair_once_an_epoch_in_another_order(found):
  data = batches(found)
  ids = [i for step in range(5) for (i,) in data.batch(step)[1][::2]]
  first, second = ids[:10], ids[10:]
  assert set(first) == set(second) == {p.id for p in found}
  assert first != second
  other = [i for s in range(5) for (i,) in batches(found, seed=4).batch(s)[1]]
  assert other[::2] != ids


def test_rows_are_interleaved_and_carry_their_reference(found):
  scores = np.arange(20, dtype=np.float32).reshape(10, 2)
  numbers = {p.id: i for i, p in enumerate(found)}
  batch, ids = batches(found, scores=scores).batch(2)
  for row, (name,) in enumerate(ids):
    pair = found[numbers[name]]
    side = pair.rejected if row % 2 else pair.chosen
    length = len(side.tokens) - 1
    np.testing.assert_array_equal(
      batch["tokens"][row, :length], side.tokens[:-1]
    )
    np.testing.assert_array_equal(
      batch["targets"][row, :length], side.tokens[1:]
    )
    np.testing.assert_array_equal(
      batch["loss_weights"][row, :length], side.mask[1:]
    )
    want = scores[numbers[name], row % 2]
    assert batch["reference_log_probs"][row] == want


def test_hosts_share_the_global_batch(found):
  whole, ids = batches(found).batch(7)
  parts = [batches(found, rows=s).batch(7) for s in (slice(0, 4), slice(4, 8))]
  for name, want in whole.items():
    got = np.concatenate([batch[name] for batch, _ in parts])
    np.testing.assert_array_equal(got, want)
  assert parts[0][1] + parts[1][1] == ids


def test_iterate_starts_anywhere(found):
  data = batches(found)
  stream = data.iterate(4)
  for want in (4, 5):
    step, batch, ids = next(stream)
    again, ids_again = data.batch(want)
    assert step == want and ids == ids_again
    np.testing.assert_array_equal(batch["tokens"], again["tokens"])
  assert data.state(4) == {"epoch": 1, "pair": 6}
  json.dumps(data.state(4))


def test_in_order_pads_the_last_batch(found):
  scores = np.ones((10, 2), np.float32)
  some = list(
    pairs_lib.in_order(
      found, scores, seq_len=32, global_batch_size=4, rows=slice(0, 8)
    )
  )
  assert [len(b["tokens"]) for b in some] == [8, 8, 8]
  real = np.concatenate([b["segment_ids"].any(-1) for b in some])
  np.testing.assert_array_equal(real, np.arange(24) < 20)
  counts = collections.Counter(len(p.chosen.tokens) for p in found)
  rows = np.concatenate([b["segment_ids"][::2].sum(-1) for b in some])
  assert counts == collections.Counter((rows[rows > 0] + 1).tolist())
  np.testing.assert_array_equal(
    some[2]["reference_log_probs"], [1] * 4 + [0] * 4
  )
