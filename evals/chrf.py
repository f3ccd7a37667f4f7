"""chrF: overlap of character n-grams (Popovic, WMT 2015), by sacrebleu."""

from collections.abc import Sequence

import numpy as np


def sentence_chrf(
  hypotheses: Sequence[str], references: Sequence[str]
) -> np.ndarray:
  """chrF2 of each answer against its reference, 0 to 100.

  sacrebleu's defaults: character n-grams up to 6, recall weighs twice, white
  space ignored. An empty answer scores 0.

  Args:
    hypotheses: what a system wrote.
    references: what was wanted, in the same order.

  Returns:
    float64 [answers].
  """
  from sacrebleu.metrics import CHRF

  metric = CHRF()
  return np.array(
    [
      metric.sentence_score(hypothesis, [reference]).score
      for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]
  )
