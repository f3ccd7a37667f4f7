"""An interpolated 3-gram model: what a decoder must beat to have learnt much.

Modified Kneser-Ney smoothing (Chen and Goodman, "An empirical study of
smoothing techniques for language modeling", TR-10-98, 1998, section 4.1.6):

  P3(w | u v) = max(c(u v w) - d3(c), 0) / c(u v .) + g3(u v) P2(w | v)
  P2(w | v)   = max(n(. v w) - d2(n), 0) / n(. v .) + g2(v) P1(w)
  P1(w)       = max(n(. w) - d1(n), 0) / n(. .) + g1 / V

c counts occurrences, n counts distinct left neighbours, d is one of three
discounts (for counts 1, 2 and 3 or more), g hands what was discounted to the
lower order. Everything is sorted int64 keys and binary search in numpy: a
million tokens fit in about a second.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class _Order:
  """One order of the model: discounted counts and back-off weights.

  Attributes:
    keys: sorted int64 codes of the n-grams that were seen.
    discounted: float64, max(count - discount, 0) of each.
    context_keys: sorted int64 codes of their contexts.
    totals: float64, sum of counts after each context.
    backoff: float64, mass handed to the lower order after each context.
    discounts: the discounts for counts 1, 2 and 3 or more.
  """

  keys: np.ndarray
  discounted: np.ndarray
  context_keys: np.ndarray
  totals: np.ndarray
  backoff: np.ndarray
  discounts: tuple[float, float, float]

  @classmethod
  def fit(cls, keys: np.ndarray, counts: np.ndarray, base: int) -> "_Order":
    """Estimates the discounts (Chen and Goodman, equation 26).

    Args:
      keys: sorted int64 codes; code // base is the context.
      counts: int64, how often each n-gram counts.
      base: number of symbols.
    """
    n1, n2, n3, n4 = (int(np.sum(counts == c)) for c in (1, 2, 3, 4))
    y = n1 / max(n1 + 2 * n2, 1)
    # A tiny corpus may miss a class of counts: then each discount falls back
    # to half of what it may take.
    d1 = 1 - 2 * y * n2 / n1 if n1 and n2 else 0.5
    d2 = 2 - 3 * y * n3 / n2 if n2 and n3 else 1.0
    d3 = 3 - 4 * y * n4 / n3 if n3 and n4 else 1.5
    discounts = (np.clip(d1, 0, 1), np.clip(d2, 0, 2), np.clip(d3, 0, 3))
    discount = np.asarray((0.0, *discounts))[np.minimum(counts, 3)]
    context_keys, index = np.unique(keys // base, return_inverse=True)
    totals = np.bincount(index, counts)
    return cls(
      keys=keys,
      discounted=counts - discount,
      context_keys=context_keys,
      totals=totals,
      backoff=np.bincount(index, discount) / totals,
      discounts=tuple(float(d) for d in discounts),
    )

  def __call__(
    self, keys: np.ndarray, context_keys: np.ndarray, lower: np.ndarray
  ) -> np.ndarray:
    """Probabilities of n-grams, given those of the lower order."""
    row, known = _find(self.context_keys, context_keys)
    column, seen = _find(self.keys, keys)
    direct = np.where(seen, self.discounted[column], 0.0) / self.totals[row]
    return np.where(known, direct + self.backoff[row] * lower, lower)


class NGram:
  """A 3-gram model over token ids, fitted on sequences.

  Attributes:
    vocab_size: V; every token of 0..V-1 has a probability above 0.
  """

  def __init__(self, sequences: Sequence[np.ndarray], *, vocab_size: int):
    """Counts.

    Args:
      sequences: 1-D integer arrays. As for a decoder, the first token of each
        (usually <bos>) is given, not predicted.
      vocab_size: V.

    Raises:
      ValueError: nothing to predict, or a token outside 0..V-1.
    """
    self.vocab_size = vocab_size
    self._base = vocab_size + 1  # one more symbol pads the first context
    trigrams = np.concatenate(
      [np.zeros(0, np.int64), *(self._trigrams(s) for s in sequences)]
    )
    if not trigrams.size:
      raise ValueError(
        "an n-gram model needs a sequence of at least two tokens to fit;"
        f" got {len(sequences)} sequences with nothing to predict"
      )
    base = self._base
    keys, counts = np.unique(trigrams, return_counts=True)
    self._three = _Order.fit(keys, counts, base)
    keys, counts = np.unique(keys % base**2, return_counts=True)
    self._two = _Order.fit(keys, counts, base)
    keys, counts = np.unique(keys % base, return_counts=True)
    self._one = _Order.fit(keys, counts, base)

  def _trigrams(self, sequence: np.ndarray) -> np.ndarray:
    s = np.asarray(sequence, np.int64)
    if s.size and not (s.min() >= 0 and s.max() < self.vocab_size):
      raise ValueError(
        f"tokens must lie in 0..{self.vocab_size - 1} (vocab_size ="
        f" {self.vocab_size}), got {s.min()}..{s.max()}"
      )
    padded = np.concatenate([[self.vocab_size], s])
    u, v, w = padded[:-2], padded[1:-1], padded[2:]
    return (u * self._base + v) * self._base + w

  def log_probs(self, sequence: np.ndarray) -> np.ndarray:
    """Natural logarithms of P(token | two before), one for each but the first.

    Args:
      sequence: [T] token ids.

    Returns:
      float64 [T - 1].
    """
    base, keys = self._base, self._trigrams(sequence)
    p = np.full(keys.shape, 1 / self.vocab_size)
    p = self._one(keys % base, np.zeros_like(keys), p)
    p = self._two(keys % base**2, keys // base % base, p)
    return np.log(self._three(keys, keys // base, p))


def _find(keys: np.ndarray, wanted: np.ndarray):
  """Indices of `wanted` in sorted `keys`, and whether each is there."""
  index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return index, keys[index] == wanted
