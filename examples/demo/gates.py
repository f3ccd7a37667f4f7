"""What the demo must show, or fail."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from evals.bootstrap import Interval, paired_bootstrap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
  """One claim.

  Attributes:
    claim: what should be better than what.
    baseline: its figure.
    system: ours.
    improvement: of ours, with its 95 % interval; None: the claim is a bound.
    passed: whether the claim holds.
  """

  claim: str
  baseline: float
  system: float
  improvement: Interval | None
  passed: bool

  def cells(self) -> tuple[str, ...]:
    """Claim, baseline, ours, improvement, verdict."""
    i = self.improvement
    gain = "" if i is None else f"{i.estimate:.3f} [{i.low:.3f}, {i.high:.3f}]"
    return (
      self.claim,
      f"{self.baseline:.3f}",
      f"{self.system:.3f}",
      gain,
      "pass" if self.passed else "FAIL",
    )


def better(
  claim: str,
  baseline: np.ndarray,
  system: np.ndarray,
  weight: np.ndarray,
  *,
  groups: Sequence[str],
  lower_is_better: bool,
) -> Gate:
  """A ratio of sums that must improve beyond chance.

  Items (answers, documents) are resampled by group, since those of one source
  file resemble each other.

  Args:
    claim: for the table.
    baseline: [items], numerators of the baseline.
    system: [items], numerators of ours.
    weight: [items], denominators of both.
    groups: [items], the document that each belongs to.
    lower_is_better: of the ratio.
  """
  _, group = np.unique(np.asarray(groups), return_inverse=True)
  a, b, w = (np.bincount(group, x) for x in (baseline, system, weight))
  worse, good = (b, a) if lower_is_better else (a, b)
  interval = paired_bootstrap(worse, w, good, w)
  return Gate(
    claim=claim,
    baseline=a.sum() / w.sum(),
    system=b.sum() / w.sum(),
    improvement=interval,
    passed=interval.low > 0,
  )


def at_least(claim: str, bound: float, value: float) -> Gate:
  """A figure that must reach a bound."""
  return Gate(
    claim=claim,
    baseline=bound,
    system=value,
    improvement=None,
    passed=value >= bound,
  )


HEAD = ("claim", "baseline", "ours", "improvement [95 %]", "")


def table(gates: Sequence[Gate]) -> str:
  """The gates in aligned columns."""
  rows = [HEAD, *(gate.cells() for gate in gates)]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(
      cell.ljust(width) for cell, width in zip(row, widths, strict=True)
    ).rstrip()
    for row in rows
  )
