"""A fixed interleaving of several endless sources by weight."""

import numpy as np


class Mixture:
  """Item j of source s is due at time (j + 1/2) / rate_s; items go by time.

  After any number of items each source is within `num_sources` of its share,
  and where an item stands is computed without walking to it.

  Args:
    weights: positive; rates are weights over their sum, so that one item is
      due per unit of time.
  """

  def __init__(self, weights):
    self.rates = np.asarray(weights, np.float64)
    if self.rates.size == 0 or not np.all(
      np.isfinite(self.rates) & (self.rates > 0)
    ):
      raise ValueError(
        "the weights of the data sources must be positive numbers, got"
        f" {list(weights)}; leave a source out rather than weigh it 0"
      )
    self.rates = self.rates / self.rates.sum()

  def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Source and index within it of the items start, ..., stop - 1.

    Returns:
      (source, index): int64 [stop - start] each.
    """
    slack = self.rates.size + 1  # |items due before t - t| <= num_sources / 2
    before = [self._due(s, start - slack) for s in range(self.rates.size)]
    after = [self._due(s, stop + slack) for s in range(self.rates.size)]
    source = np.repeat(np.arange(self.rates.size), np.subtract(after, before))
    index = np.concatenate(
      [np.arange(b, a) for b, a in zip(before, after, strict=True)]
    )
    order = np.lexsort((source, (index + 0.5) / self.rates[source]))
    order = order[start - sum(before) : stop - sum(before)]
    return source[order], index[order]

  def counts(self, items: int) -> np.ndarray:
    """How many of the first `items` come from each source; int64 [S]."""
    slack = self.rates.size + 1
    before = [self._due(s, items - slack) for s in range(self.rates.size)]
    source, _ = self.locate(min(sum(before), items), items)
    return np.asarray(before) + np.bincount(source, minlength=len(before))

  def _due(self, source: int, time: float) -> int:
    """How many items of a source are due before a time; exact in floats."""
    rate = self.rates[source]
    count = max(0, int(rate * time))
    while count > 0 and (count - 0.5) / rate >= time:
      count -= 1
    while (count + 0.5) / rate < time:
      count += 1
    return count
