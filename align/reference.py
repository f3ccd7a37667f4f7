"""The frozen reference model: log-probabilities that no step changes."""

from collections.abc import Callable, Iterable

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from align.preference import sequence_log_probs
from data.pack import Batch
from model.execution import Execution
from sharding.arrays import batch_sharding

# (model, global batch) -> float32 [B], placed as the rows are.
Score = Callable[[nnx.Module, dict[str, jax.Array]], jax.Array]


def make_score(execution: Execution, model_shardings: nnx.Module) -> Score:
  """Returns `sequence_log_probs`, jitted.

  Args:
    execution: how the model runs; that of the training step, so that the
      policy's first log-probabilities are the reference's.
    model_shardings: `shardings.model` of the training step.
  """
  rows = batch_sharding(execution.mesh, execution.rules)
  return jax.jit(
    lambda model, batch: sequence_log_probs(model, batch, execution),
    in_shardings=(model_shardings, rows),
    out_shardings=rows,
  )


def score_pairs(
  score: Score,
  model: nnx.Module,
  batches: Iterable[Batch],
  place: Callable[[Batch], dict[str, jax.Array]],
  *,
  num_pairs: int,
) -> np.ndarray:
  """Scores pairs once, on all hosts.

  Args:
    score: from `make_score`.
    model: the reference.
    batches: of `align.pairs.in_order`.
    place: host rows -> global arrays.
    num_pairs: the rest is padding.

  Returns:
    float32 [num_pairs, 2]: log-probabilities of chosen and rejected answers.
  """
  scores = [score(model, place(batch)) for batch in batches]
  scores = multihost_utils.process_allgather(scores, tiled=True)
  return np.concatenate(scores).reshape(-1, 2)[:num_pairs]


def with_scores(score: Score, model: nnx.Module, batch: dict) -> dict:
  """Adds "reference_log_probs" to a global batch."""
  return batch | {"reference_log_probs": score(model, batch)}
