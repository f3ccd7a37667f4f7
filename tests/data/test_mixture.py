"""The interleaving against its definition, item by item."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.mixture import Mixture

WEIGHTS = st.lists(
  st.floats(1e-3, 1e3) | st.integers(1, 4), min_size=1, max_size=5
)


def brute_force(weights, items):
  """All items by the time they are due, sorted."""
  rates = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64)
  due = [
    ((j + 0.5) / rate, s, j)
    for s, rate in enumerate(rates)
    for j in range(int(items * rate) + len(weights) + 2)
  ]
  return [(s, j) for _, s, j in sorted(due)[:items]]


@given(weights=WEIGHTS, cuts=st.lists(st.integers(0, 300), max_size=4))
def test_any_range_is_that_part_of_the_order(weights, cuts):
  mixture = Mixture(weights)
  wanted = brute_force(weights, 300)
  borders = sorted({0, 300, *cuts})
  got = []
  for start, stop in itertools.pairwise(borders):
    got += zip(*(a.tolist() for a in mixture.locate(start, stop)), strict=True)
  assert got == wanted


@given(weights=WEIGHTS, items=st.integers(0, 500))
def test_counts_are_near_the_weights(weights, items):
  mixture = Mixture(weights)
  counts = mixture.counts(items)
  source, _ = mixture.locate(0, items)
  np.testing.assert_array_equal(
    counts, np.bincount(source, minlength=len(weights))
  )
  assert np.abs(counts - items * mixture.rates).max() <= len(weights)


def test_far_from_the_start():
  mixture = Mixture([0.7, 0.2, 0.1])
  start = 10**12
  source, index = mixture.locate(start, start + 1000)
  np.testing.assert_array_equal(
    np.bincount(source), mixture.counts(start + 1000) - mixture.counts(start)
  )
  for s, first in enumerate(mixture.counts(start)):
    np.testing.assert_array_equal(
      index[source == s], first + np.arange((source == s).sum())
    )


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [float("nan")]])
def test_bad_weights(weights):
  with pytest.raises(ValueError, match="must be positive"):
    Mixture(weights)
