"""What a loop minimises, in parts that any split of a batch adds up to."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from model.dropout import row_keys
from model.execution import Execution
from model.losses import cross_entropy
from model.transformer import Transformer
from train.experts import ROUTER

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
  """A loss of the hidden states of one forward pass, as a sum and its weight.

  The division of the one by the other is in `train/step.py`. A pipeline calls
  the parts: its last stage has hidden states, and no other.

  Attributes:
    weight: batch -> the sum of weights, a float32 scalar of the batch alone.
    loss: (model, hidden [B, T, D], batch, execution) -> (the weighted sum of
      losses, more sums to report over the same weight), float32 scalars.
    dropout: False where two models must be compared as they are.
  """

  weight: Callable[[Batch], jax.Array]
  loss: Callable[
    [Transformer, jax.Array, Batch, Execution], tuple[jax.Array, Metrics]
  ]
  dropout: bool = True

  def dropout_keys(
    self, batch: Batch, key: jax.Array | None
  ) -> jax.Array | None:
    """A key a row of the global batch, which `batch["row_ids"]` numbers."""
    if key is None or not self.dropout:
      return None
    return row_keys(key, batch["row_ids"])

  def __call__(
    self,
    model: Transformer,
    batch: Batch,
    key: jax.Array | None,
    execution: Execution,
  ) -> tuple[jax.Array, jax.Array, Metrics]:
    """Returns the loss sum, the weight sum and the sums to report.

    Of a model with experts these hold, as "router", its statistics; its router
    loss is not in the sum.

    Args:
      model: the weights.
      batch: `tokens`, `positions`, `segment_ids`, `row_ids` and what the loss
        reads.
      key: of dropout; None: evaluation.
      execution: how to run.
    """
    hidden_BTD, stats = model.forward(
      batch["tokens"],
      positions=batch["positions"],
      segment_ids=batch["segment_ids"],
      dropout_keys=self.dropout_keys(batch, key),
      execution=execution,
    )
    loss, aux = self.loss(model, hidden_BTD, batch, execution)
    if stats:
      aux = aux | {ROUTER: stats}
    return loss, self.weight(batch), aux


def lm_loss(*, z_loss: float = 0.0) -> Objective:
  """Returns the cross-entropy of `targets` under `loss_weights`.

  What pretraining and SFT minimise. Its aux sums are "nll" and "z_loss", the
  parts of the loss.

  Args:
    z_loss: factor of logsumexp ** 2 (PaLM, arXiv:2204.02311, section 5).
  """

  def loss(model, hidden_BTD, batch, execution):
    total, _, aux = cross_entropy(
      model,
      hidden_BTD,
      batch["targets"],
      batch["loss_weights"],
      z_loss=z_loss,
      execution=execution,
    )
    return total, aux

  return Objective(lambda batch: jnp.sum(batch["loss_weights"]), loss)
