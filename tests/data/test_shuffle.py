"""The computed permutation: a permutation, well mixed, forever the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import shuffle


@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70))
def test_is_a_permutation(n, seed):
  image = shuffle.permute(np.arange(n), n, shuffle.key(seed))
  np.testing.assert_array_equal(np.sort(image), np.arange(n))


def test_each_index_alone_as_all_together():
  n, keys = 1009, shuffle.key(3, np.arange(1009) % 7)
  together = shuffle.permute(np.arange(n), n, keys)
  alone = [shuffle.permute(i, n, keys[i])[0] for i in range(n)]
  np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("n", [5, 37])
def test_every_place_is_equally_likely(n):
  # Chi-square over (index, image): (n - 1)^2 degrees of freedom; the bound is
  # the mean plus 5 standard deviations.
  trials = 4000
  keys = np.repeat(shuffle.key(np.arange(trials)), n)
  index = np.tile(np.arange(n), trials)
  image = shuffle.permute(index, n, keys)
  counts = np.bincount(index * n + image, minlength=n * n)
  wanted = trials / n
  chi2 = ((counts - wanted) ** 2 / wanted).sum()
  freedom = (n - 1) ** 2
  assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5


def test_neighbours_do_not_stay_together():
  n = 10_000
  image = shuffle.permute(np.arange(n), n, shuffle.key(0))
  ahead = image[1:] - image[:-1]
  # Correlation of neighbours is 0 within 4 / sqrt(n).
  assert abs(np.corrcoef(image[1:], image[:-1])[0, 1]) < 4 / n**0.5
  assert (np.abs(ahead) == 1).mean() < 1e-2


def test_keys_differ_in_every_part():
  keys = {
    int(shuffle.key(*parts)[0])
    for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2**64 - 1,)]
  }
  assert len(keys) == 7


def test_values_never_change():
  # Recorded: a run must find its order again with every later version.
  image = shuffle.permute(np.arange(10), 10, shuffle.key(1, 2, 3))
  assert image.tolist() == [6, 3, 4, 9, 5, 7, 8, 0, 2, 1]
  image = shuffle.permute(np.array([0, 1, 10**12]), 10**12 + 1, shuffle.key(7))
  assert image.tolist() == [289752790639, 292264897077, 726631020738]
