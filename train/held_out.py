"""Loss, perplexity and bits per byte on text that is never trained on."""

import itertools
import math
from collections.abc import Callable, Mapping

import jax
import numpy as np

from data.loader import Loader


def make_evaluate(
  eval_step: Callable,
  loader: Loader,
  place: Callable[[Mapping], Mapping[str, jax.Array]],
  *,
  num_batches: int | None = None,
) -> Callable[..., dict[str, float]]:
  """Returns `evaluate(model) -> metrics`.

  Metrics are held_out_loss (nats a token), held_out_ppl (its exponential)
  and, where the store knows the bytes of its documents,
  held_out_bits_per_byte: nats / ln 2 / bytes of UTF-8. With `num_batches` the
  bytes are those of the whole set times the share of its tokens.

  Args:
    eval_step: (model, batch) -> sums, from `train.step.make_eval_step`, of a
      loss with "nll" in its aux.
    loader: one pass over one store (`num_epochs=1`).
    place: host rows -> global arrays.
    num_batches: the first few only; None: all.
  """
  (store,), (plan,) = loader.datasets, loader.plans
  # One step of a piece is one token that is predicted.
  num_tokens = int(plan.size.sum())
  num_bytes = int(store.num_bytes[np.unique(plan.document)].sum())
  has_bytes = store.mask is None and num_bytes > 0

  def evaluate(model) -> dict[str, float]:
    sums = []
    batches = loader.iterate(0)
    for _, batch, _ in itertools.islice(batches, num_batches):
      _, weight, aux = eval_step(model, place(batch))
      sums.append((aux["nll"], weight))
    batches.close()
    nll, weight = np.asarray(jax.device_get(sums), np.float64).sum(axis=0)
    loss = float(nll / weight)
    values = {"held_out_loss": loss, "held_out_ppl": math.exp(min(loss, 700.0))}
    if has_bytes:
      bits = loss / math.log(2)
      values["held_out_bits_per_byte"] = bits * num_tokens / num_bytes
    return values

  return evaluate
