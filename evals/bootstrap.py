"""Paired bootstrap over documents: is one system better than another?

Koehn, "Statistical significance tests for machine translation evaluation"
(EMNLP 2004), section 3, with percentile intervals (Efron and Tibshirani, "An
introduction to the bootstrap", 1993, chapter 13). Documents are resampled, not
tokens: tokens of one document are not independent.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
  """An estimate with its interval.

  Attributes:
    estimate: the statistic on the documents themselves.
    low: lower end.
    high: upper end.
  """

  estimate: float
  low: float
  high: float


def paired_bootstrap(
  a_sum: np.ndarray,
  a_weight: np.ndarray,
  b_sum: np.ndarray,
  b_weight: np.ndarray,
  *,
  level: float = 0.95,
  resamples: int = 10_000,
  seed: int = 0,
) -> Interval:
  """Interval of sum(b_sum) / sum(b_weight) - sum(a_sum) / sum(a_weight).

  Each argument holds one number a document, in the same order: nats and bytes
  give bits per byte, correct answers and questions give accuracy. A resample
  draws the same documents for both systems, so what makes a document hard
  cancels.

  Args:
    a_sum: [documents], the numerator of the baseline.
    a_weight: [documents], its denominator, at least 0.
    b_sum: [documents], the numerator of the system.
    b_weight: [documents], its denominator, at least 0.
    level: probability that the interval covers.
    resamples: number of bootstrap samples.
    seed: of the resampling.

  Raises:
    ValueError: shapes differ, or there are fewer than two documents.
  """
  arrays = [np.asarray(x, float) for x in (a_sum, a_weight, b_sum, b_weight)]
  shapes = {x.shape for x in arrays}
  if len(shapes) > 1 or arrays[0].ndim != 1 or arrays[0].size < 2:
    raise ValueError(
      "a paired bootstrap needs four 1-D arrays of equal length, at least two"
      f" documents; got shapes {[x.shape for x in arrays]}"
    )

  def statistic(sums):
    a, a_total, b, b_total = sums
    return b / b_total - a / a_total

  values, size = np.stack(arrays, axis=1), arrays[0].size
  counts = np.random.default_rng(seed).multinomial(
    size, np.full(size, 1 / size), size=resamples
  )
  samples = statistic((counts @ values).T)
  tail = (1 - level) / 2
  low, high = np.quantile(samples, [tail, 1 - tail])
  return Interval(
    estimate=float(statistic(values.sum(axis=0))),
    low=float(low),
    high=float(high),
  )
