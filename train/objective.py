"""What pretraining and SFT minimise: the next token, where it has a weight."""

from model.dropout import row_keys
from model.losses import cross_entropy
from train.step import LossFn


def lm_loss(*, z_loss: float = 0.0) -> LossFn:
  """Returns the cross-entropy of `targets` under `loss_weights`.

  Its aux sums are "nll" and "z_loss", the parts of the loss.

  Args:
    z_loss: factor of logsumexp ** 2 (PaLM, arXiv:2204.02311, section 5).
  """

  def loss_fn(model, batch, key, execution):
    hidden_BTD = model(
      batch["tokens"],
      positions=batch["positions"],
      segment_ids=batch["segment_ids"],
      dropout_keys=None if key is None else row_keys(key, batch["row_ids"]),
      execution=execution,
    )
    return cross_entropy(
      model,
      hidden_BTD,
      batch["targets"],
      batch["loss_weights"],
      z_loss=z_loss,
      execution=execution,
    )

  return loss_fn
