"""Preference losses: their formula, gradient, TRL's figures, step 0."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from align import preference
from data.pack import empty_batch
from model.execution import Execution
from tests.align import tiny
from tests.oracles import preference_cases, record_preferences
from tests.tolerances import tolerance

RECORDED = json.loads(record_preferences.PATH.read_text())


def ratios(seed=0, size=9):
  return 4 * np.random.default_rng(seed).normal(size=(2, size))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_formula(label_smoothing):
  chosen, rejected = ratios()
  got = preference.dpo(
    chosen, rejected, beta=0.3, label_smoothing=label_smoothing
  )
  p = 1 / (1 + np.exp(-0.3 * (chosen - rejected)))  # Bradley-Terry
  want = -(1 - label_smoothing) * np.log(p) - label_smoothing * np.log(1 - p)
  np.testing.assert_allclose(got, want, **tolerance("loss"))


def test_gradient_is_the_papers():
  # Section 4: -beta sigmoid(r_rejected - r_chosen) (grad chosen - rejected).
  chosen, rejected = ratios(1)
  loss = lambda c, r: preference.dpo(c, r, beta=0.3).sum()
  got = jax.grad(loss, argnums=(0, 1))(jnp.array(chosen), jnp.array(rejected))
  weight = 0.3 / (1 + np.exp(0.3 * (chosen - rejected)))
  np.testing.assert_allclose(got, [-weight, weight], **tolerance("gradient"))


def test_large_margins_stay_finite():
  chosen = jnp.array([1e4, -1e4])
  loss, grad = jax.value_and_grad(
    lambda c: preference.dpo(c, -c, beta=1.0).sum()
  )(chosen)
  np.testing.assert_allclose(loss, 2e4)
  np.testing.assert_allclose(grad, [0, -2])


@pytest.mark.parametrize("beta", preference_cases.BETAS)
@pytest.mark.parametrize("kind", ["dpo", "cdpo"])
def test_equals_trl(kind, beta):
  cases, want = preference_cases.inputs(), RECORDED[f"{kind} beta={beta}"]
  ratio = cases["policy"].sum(-1) - cases["reference"]
  smoothing = preference_cases.LABEL_SMOOTHING if kind == "cdpo" else 0.0
  got = preference.dpo(
    ratio[:, 0], ratio[:, 1], beta=beta, label_smoothing=smoothing
  )
  np.testing.assert_allclose(got, want["loss"], **tolerance("loss"))


def batch_of_pairs():
  """Two pairs and a pair of padding, [6, 11]; rows of unequal lengths."""
  rng = np.random.default_rng(5)
  batch = empty_batch(6, 11)
  for row, (length, answer) in enumerate([(11, 4), (7, 2), (9, 9), (6, 1)]):
    batch["tokens"][row, :length] = rng.integers(1, tiny.VOCAB, length)
    batch["targets"][row, :length] = rng.integers(1, tiny.VOCAB, length)
    batch["positions"][row, :length] = np.arange(length)
    batch["segment_ids"][row, :length] = 1
    batch["loss_weights"][row, length - answer : length] = 1
  return batch


def test_sequence_log_probs_sum_the_answer():
  model, batch = tiny.model(), batch_of_pairs()
  got = preference.sequence_log_probs(model, batch, Execution())
  # Causal: what pads a row on the right harms no token of it.
  logits = model.logits(model(jnp.array(batch["tokens"])))
  logits = np.asarray(logits, np.float64)
  logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
  of_targets = np.take_along_axis(logits, batch["targets"][..., None], -1)
  for row in range(4):
    answer = batch["loss_weights"][row] == 1
    want = of_targets[row, answer, 0].sum()
    np.testing.assert_allclose(got[row], want, rtol=1e-5)
  np.testing.assert_array_equal(got[4:], 0)


def test_loss_and_metrics_by_hand():
  model, batch = tiny.model(), batch_of_pairs()
  policy = preference.sequence_log_probs(model, batch, Execution())
  shift = np.array([1.5, -2.0, 0.25, 0.25, 9.0, -9.0], np.float32)
  batch["reference_log_probs"] = np.asarray(policy) - shift
  loss_fn = preference.dpo_loss(beta=0.2)
  loss, weight, aux = loss_fn(model, batch, None, Execution())
  assert weight == 2  # the pair of padding does not count
  margins = 0.2 * np.array([3.5, 0.0])
  close = tolerance("loss")
  np.testing.assert_allclose(loss, np.log1p(np.exp(-margins)).sum(), **close)
  want = {
    "reward_chosen": 0.2 * (1.5 + 0.25),
    "reward_rejected": 0.2 * (-2.0 + 0.25),
    "reward_margin": margins.sum(),
    "preference_accuracy": 1.5,  # a win and a tie
    "kl": -(1.5 - 2.0 + 0.25 + 0.25) / 2,
  }
  assert aux.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_allclose(aux[name], value, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_step_zero_is_ln_2(label_smoothing):
  model, batch = tiny.model(), batch_of_pairs()
  batch["reference_log_probs"] = preference.sequence_log_probs(
    model, batch, Execution()
  )
  loss_fn = preference.dpo_loss(beta=0.5, label_smoothing=label_smoothing)
  loss, weight, aux = loss_fn(model, batch, None, Execution())
  np.testing.assert_allclose(loss / weight, np.log(2), rtol=1e-6)
  assert aux["preference_accuracy"] / weight == 0.5
  assert aux["kl"] == aux["reward_margin"] == 0


def test_metrics_are_trls():
  cases, want = preference_cases.inputs(), RECORDED["dpo beta=0.5"]
  ratio = cases["policy"].sum(-1) - cases["reference"]
  close = tolerance("loss")
  np.testing.assert_allclose(0.5 * ratio[:, 0], want["reward_chosen"], **close)
  np.testing.assert_allclose(
    0.5 * ratio[:, 1], want["reward_rejected"], **close
  )


def test_evaluate_weighs_batches_by_their_pairs():
  # Batches of 4 pairs and of 1: a mean of means would give 0.5 for accuracy.
  sums = {
    "a": (jnp.float32(2), jnp.float32(4), {"preference_accuracy": 4.0}),
    "b": (jnp.float32(3), jnp.float32(1), {"preference_accuracy": 0.0}),
  }
  evaluate = preference.make_evaluate(
    lambda model, name: sums[name], lambda: iter("ab"), lambda name: name
  )
  assert evaluate(None) == {
    "held_out_loss": 1.0,
    "held_out_preference_accuracy": 0.8,
  }
