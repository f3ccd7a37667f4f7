"""Losses on pairs of answers, one preferred to the other.

Rows of a preference batch are interleaved: chosen 0, rejected 0, chosen 1,
rejected 1, ...; `loss_weights` are 1 on the answers' tokens and 0 elsewhere;
"reference_log_probs" (float32 [B]) holds the frozen reference model's
`sequence_log_probs` of each row.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from model.losses import batch_log_probs, weighted_log_probs
from train.objective import Objective


def sequence_log_probs(model, batch, execution) -> jax.Array:
  """log P(answer | prompt) of each row: the sum over its weighted tokens.

  Summed, not averaged: DPO's derivation is about whole answers.

  Args:
    model: a `Transformer`.
    batch: the usual fields, [B, T], one sequence a row.
    execution: how to run.

  Returns:
    float32 [B], in nats.
  """
  return jnp.sum(batch_log_probs(model, batch, execution), axis=-1)


def dpo(
  log_ratio_chosen: jax.Array,
  log_ratio_rejected: jax.Array,
  *,
  beta: float,
  label_smoothing: float = 0.0,
) -> jax.Array:
  """DPO: -log sigmoid of the margin of implicit rewards.

  Rafailov et al., "Direct preference optimization" (arXiv:2305.18290),
  equation 7. With label smoothing e it is the conservative DPO of Mitchell, "A
  note on DPO with noisy preferences" (2023), equation 3: labels are flipped
  with probability e.

  Args:
    log_ratio_chosen: [pairs], log policy - log reference of chosen answers.
    log_ratio_rejected: [pairs], the same of rejected ones.
    beta: strength of the tie to the reference.
    label_smoothing: e, in [0, 0.5).

  Returns:
    [pairs]; ln 2 where the policy is the reference, for every e.
  """
  margin = beta * (log_ratio_chosen - log_ratio_rejected)
  return -(
    (1 - label_smoothing) * jax.nn.log_sigmoid(margin)
    + label_smoothing * jax.nn.log_sigmoid(-margin)
  )


def dpo_loss(*, beta: float, label_smoothing: float = 0.0) -> Objective:
  """Returns `dpo` as a loss of the training step; its weight counts pairs.

  Pairs of padding rows weigh nothing. Aux sums are the implicit rewards,
  beta * (log policy - log reference), of chosen and rejected answers; their
  margin; preference_accuracy: the margin is above 0, a tie counts one half;
  and kl: log reference - log policy, averaged over a pair's answers. Were
  these drawn from the reference, its mean would be KL(reference || policy).

  Args:
    beta: strength of the tie to the reference.
    label_smoothing: share of labels taken to be wrong, in [0, 0.5).
  """

  def weights(batch):
    is_pair = jnp.any(batch["loss_weights"] > 0, axis=-1)[0::2]
    return is_pair.astype(jnp.float32)

  def loss(model, hidden_BTD, batch, execution):
    log_probs_BT = weighted_log_probs(model, hidden_BTD, batch, execution)
    ratio = jnp.sum(log_probs_BT, axis=-1) - batch["reference_log_probs"]
    chosen, rejected = ratio[0::2], ratio[1::2]
    losses = dpo(chosen, rejected, beta=beta, label_smoothing=label_smoothing)
    per_pair = {
      "reward_chosen": beta * chosen,
      "reward_rejected": beta * rejected,
      "reward_margin": beta * (chosen - rejected),
      "preference_accuracy": wins(chosen - rejected),
      "kl": -(chosen + rejected) / 2,
    }
    weight = weights(batch)
    aux = {name: jnp.sum(weight * x) for name, x in per_pair.items()}
    return jnp.sum(weight * losses), aux

  # No dropout: policy and reference must be the same function.
  return Objective(lambda batch: jnp.sum(weights(batch)), loss, dropout=False)


def make_evaluate(
  eval_step: Callable,
  batches: Callable[[], Iterable[dict]],
  place: Callable[[dict], dict[str, jax.Array]],
) -> Callable[..., dict[str, float]]:
  """Returns `evaluate(model) -> metrics`: the loss and its aux on all pairs.

  Args:
    eval_step: (model, batch) -> sums, from `train.step.make_eval_step`.
    batches: opens one pass over the pairs.
    place: host rows -> global arrays.
  """

  def evaluate(model) -> dict[str, float]:
    sums = []
    for batch in batches():
      loss, weight, aux = eval_step(model, place(batch))
      sums.append({"loss": loss, "weight": weight, **aux})
    sums = jax.device_get(sums)
    total = {name: sum(float(s[name]) for s in sums) for name in sums[0]}
    weight = total.pop("weight")
    return {f"held_out_{name}": x / weight for name, x in total.items()}

  return evaluate


def wins(margin: jax.Array) -> jax.Array:
  """1 where the chosen answer wins, 0 where it loses, 0.5 for a tie."""
  return 0.5 * (1.0 + jnp.sign(margin))
