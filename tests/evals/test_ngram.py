"""The 3-gram model: sums to one, equals a brute-force Kneser-Ney."""

import collections

import numpy as np
import pytest

from evals.ngram import NGram


def _sequences(seed=0, vocab=7, count=40):
  rng = np.random.default_rng(seed)
  zipf = 1 / np.arange(1, vocab + 1)
  return [
    rng.choice(vocab, size=rng.integers(1, 30), p=zipf / zipf.sum())
    for _ in range(count)
  ]


def _brute_force(sequences, vocab, discounts, context, w):
  """P(w | context) by dictionaries and recursion; context is a tuple."""
  order = len(context) + 1
  padded = [(vocab, *map(int, s)) for s in sequences]
  trigrams = collections.Counter(
    s[i : i + 3] for s in padded for i in range(len(s) - 2)
  )
  counts = collections.Counter(trigrams)
  for _ in range(3 - order):  # distinct left neighbours
    counts = collections.Counter(gram[1:] for gram in counts)
  lower = (
    _brute_force(sequences, vocab, discounts, context[1:], w)
    if context
    else 1 / vocab
  )
  after = {g: c for g, c in counts.items() if g[:-1] == context}
  if not after:
    return lower
  discount = lambda c: discounts[order][min(c, 3) - 1]
  count = after.get((*context, w), 0)
  direct = count - discount(count) if count else 0.0
  freed = sum(discount(c) for c in after.values())
  return (direct + freed * lower) / sum(after.values())


def test_equals_brute_force():
  sequences = _sequences()
  model = NGram(sequences, vocab_size=7)
  discounts = {
    1: model._one.discounts,
    2: model._two.discounts,
    3: model._three.discounts,
  }
  text = [3, 0, 1, 0, 6, 6, 6, 5, 2]
  padded = [7, *text]
  want = [
    np.log(_brute_force(sequences, 7, discounts, tuple(padded[i : i + 2]), t))
    for i, t in enumerate(padded[2:])
  ]
  np.testing.assert_allclose(model.log_probs(np.array(text)), want, rtol=1e-12)


@pytest.mark.parametrize("context", [(0,), (6,), (0, 1), (6, 5), (2, 2)])
def test_sums_to_one(context):
  model = NGram(_sequences(), vocab_size=7)
  total = sum(
    np.exp(model.log_probs(np.array([*context, w]))[-1]) for w in range(7)
  )
  np.testing.assert_allclose(total, 1, rtol=1e-12)


def test_discounts_are_chen_and_goodmans():
  # One-token alphabet after each of many contexts: counts 1 x4, 2 x3, 3 x2,
  # 4 x1 of distinct trigrams with distinct contexts.
  sequences = []
  for i, count in enumerate((1, 1, 1, 1, 2, 2, 2, 3, 3, 4)):
    sequences += [np.array([i, 11])] * count
  model = NGram(sequences, vocab_size=12)
  y = 4 / (4 + 2 * 3)
  np.testing.assert_allclose(
    model._three.discounts,
    (1 - 2 * y * 3 / 4, 2 - 3 * y * 2 / 3, 3 - 4 * y * 1 / 2),
  )


def test_learns_a_deterministic_language():
  cycle = np.tile(np.arange(5), 400)
  other = np.random.default_rng(1).integers(0, 5, 2000)
  model = NGram([cycle], vocab_size=5)
  assert -model.log_probs(cycle).mean() < 0.02
  assert -model.log_probs(other).mean() > np.log(5)


def test_beats_every_lower_order_on_a_second_order_source():
  # w = u + v mod 11 with noise: bigrams are useless, trigrams nearly enough.
  rng = np.random.default_rng(2)
  text = [1, 2]
  for noise in rng.random(30_000):
    text.append(
      (text[-1] + text[-2]) % 11 if noise < 0.9 else int(rng.integers(11))
    )
  text = np.array(text)
  model = NGram([text[:20_000]], vocab_size=11)
  entropy = -(0.9 + 0.1 / 11) * np.log(0.9 + 0.1 / 11) - 10 * (
    0.1 / 11
  ) * np.log(0.1 / 11)
  nats = -model.log_probs(text[20_000:]).mean()
  assert entropy - 0.03 < nats < entropy + 0.03


@pytest.mark.parametrize(
  ("sequences", "message"),
  [
    ([np.array([1])], "at least two tokens"),
    ([], "at least two tokens"),
    ([np.array([1, 7])], "0..6"),
    ([np.array([-1, 3])], "0..6"),
  ],
)
def test_refuses(sequences, message):
  with pytest.raises(ValueError, match=message):
    NGram(sequences, vocab_size=7)
