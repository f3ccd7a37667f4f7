"""The bootstrap against normal approximations and its own definition."""

import numpy as np
import pytest

from evals.bootstrap import paired_bootstrap


def test_mean_difference_matches_the_normal_interval():
  # Unit weights: the statistic is a mean of differences, whose bootstrap
  # standard error is std / sqrt(n) in closed form.
  rng = np.random.default_rng(0)
  a, b, one = rng.normal(size=400), rng.normal(0.3, 2, size=400), np.ones(400)
  got = paired_bootstrap(a, one, b, one, resamples=20_000)
  error = (b - a).std() / np.sqrt(400)
  np.testing.assert_allclose(got.estimate, (b - a).mean(), rtol=1e-12)
  np.testing.assert_allclose(
    [got.low, got.high],
    got.estimate + 1.959964 * error * np.array([-1, 1]),
    atol=0.05 * error,
  )


def test_ratio_of_sums_matches_the_delta_method():
  rng = np.random.default_rng(1)
  weight = rng.gamma(4.0, size=500)
  a, b = weight * rng.normal(2, 0.5, 500), weight * rng.normal(1.9, 0.5, 500)
  got = paired_bootstrap(a, weight, b, weight, resamples=20_000)
  estimate = b.sum() / weight.sum() - a.sum() / weight.sum()
  residual = (b - a - estimate * weight) / weight.mean()
  error = residual.std() / np.sqrt(500)
  np.testing.assert_allclose(got.estimate, estimate, rtol=1e-12)
  np.testing.assert_allclose(
    [got.low, got.high],
    estimate + 1.959964 * error * np.array([-1, 1]),
    atol=0.1 * error,
  )


def test_pairing_cancels_what_documents_share():
  rng = np.random.default_rng(2)
  one, hard = np.ones(50), rng.normal(0, 10, size=50)
  a, b = hard, hard + 0.1 + rng.normal(0, 0.01, size=50)
  paired = paired_bootstrap(a, one, b, one)
  assert paired.low > 0
  shuffled = paired_bootstrap(a, one, rng.permutation(b), one)
  assert shuffled.low < 0


def test_covers_as_often_as_it_says():
  # 300 draws of a true difference 0: a 90 % interval misses in about 10 %.
  rng, one, misses = np.random.default_rng(3), np.ones(80), 0
  for seed in range(300):
    a, b = rng.exponential(size=(2, 80))
    got = paired_bootstrap(a, one, b, one, level=0.9, resamples=500, seed=seed)
    misses += not got.low <= 0 <= got.high
  assert 0.05 < misses / 300 < 0.16


def test_is_a_function_of_its_seed():
  a, b, w = np.random.default_rng(4).random((3, 30))
  first = paired_bootstrap(a, w, b, w, seed=1)
  assert first == paired_bootstrap(a, w, b, w, seed=1)
  assert first != paired_bootstrap(a, w, b, w, seed=2)


@pytest.mark.parametrize("shapes", [((3,), (4,)), ((1,), (1,)), ((2, 2),) * 2])
def test_refuses(shapes):
  a, b = map(np.ones, shapes)
  with pytest.raises(ValueError, match="at least two"):
    paired_bootstrap(a, a, b, b)
