"""chrF by its formula, on strings short enough to count by hand."""

import numpy as np
import pytest

from evals.chrf import sentence_chrf

pytest.importorskip("sacrebleu", reason="extra `demo` is not installed")


def test_by_hand():
  # "abc" against "abd": unigrams 2 of 3 match, bigrams 1 of 2, trigrams 0 of
  # 1, no longer n-grams. Precision equals recall, so F equals it: their mean.
  got = sentence_chrf(["abc"], ["abd"])
  np.testing.assert_allclose(got, [100 * (2 / 3 + 1 / 2 + 0) / 3], rtol=1e-6)


def test_extremes_and_order():
  got = sentence_chrf(
    ["Return the name.", "", "zzzz", "Return a name."],
    ["Return the name."] * 4,
  )
  assert got[0] == pytest.approx(100)
  assert got[1] == got[2] == 0
  assert 0 < got[3] < 100


def test_lengths_must_agree():
  with pytest.raises(ValueError):
    sentence_chrf(["a"], ["a", "b"])
