"""The sampler against sorting in numpy, and its draws against chi-square."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serve import sampler
from serve.config import Sampling
from tests.tolerances import tolerance

sample = jax.jit(sampler.sample)
truncate = jax.jit(sampler.truncate)


def distribution(logits, s: Sampling):
  """The probabilities that a row of settings asks for, by sorting.

  For logits without ties: with them the order of a sort would decide.
  """
  logits = np.asarray(logits, np.float64) / (s.temperature or 1.0)
  p = np.exp(logits - logits.max())
  p /= p.sum()
  order = np.argsort(-p, kind="stable")
  keep = np.ones(p.size, bool)
  if s.top_k:
    keep[order[s.top_k :]] = False
    p = np.where(keep, p, 0.0) / p[keep].sum()
  above = np.cumsum(p[order]) - p[order]
  keep[order[1:]] &= above[1:] < s.top_p
  keep &= p >= s.min_p * p.max()
  return np.where(keep, p, 0.0) / p[keep].sum()


SETTINGS = [
  Sampling(),
  Sampling(temperature=0.5),
  Sampling(top_k=3),
  Sampling(top_k=1000),
  Sampling(top_p=0.6),
  Sampling(top_p=0.0),
  Sampling(min_p=0.2),
  Sampling(min_p=1.0),
  Sampling(temperature=1.7, top_k=9, top_p=0.8, min_p=0.15),
]


@pytest.fixture(scope="module")
def logits():
  rng = np.random.default_rng(0)
  return rng.normal(0, 2, (len(SETTINGS), 23)).astype(np.float32)


def test_truncation_is_the_closed_form(logits):
  """Every row has settings of its own."""
  cut = truncate(logits, sampler.knobs(SETTINGS))
  wanted = [distribution(*row) for row in zip(logits, SETTINGS)]
  np.testing.assert_allclose(
    jax.nn.softmax(cut), wanted, **tolerance("elementwise")
  )
  kept = [(row > 0).sum() for row in wanted]
  assert kept[2] == 3 and kept[3] == 23 and kept[5] == kept[7] == 1
  assert 1 < kept[8] < 9


def test_truncation_of_a_long_vocabulary():
  """Where float32 sums over the vocabulary round."""
  logits = np.random.default_rng(1).normal(0, 3, (3, 50_000))
  logits = logits.astype(np.float32)
  rows = [Sampling(top_k=40), Sampling(top_p=0.9), Sampling(top_p=0.999999)]
  cut = np.asarray(truncate(logits, sampler.knobs(rows)))
  for row, s, got in zip(logits, rows, np.isfinite(cut).sum(axis=1)):
    wanted = (distribution(row, s) > 0).sum()
    # Tokens of probability 1e-10 come and go with the rounding of 1.
    assert abs(got - wanted) <= (0 if s.top_k else 0.01 * wanted)


def test_ties_at_the_border_are_all_kept():
  logits = jnp.array([[1.0, 3.0, 2.0, 2.0, 2.0, -0.0, 0.0]] * 4)
  rows = [Sampling(top_k=2), Sampling(top_p=0.5), Sampling(top_k=6)]
  rows += [Sampling(top_p=0.0)]
  kept = np.isfinite(truncate(logits, sampler.knobs(rows)))
  np.testing.assert_array_equal(
    kept.astype(int),
    [[0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0, 0], [1] * 7, [0, 1] + [0] * 5],
  )


def test_barred_tokens_stay_barred():
  """One token is left: whatever the settings, it is drawn."""
  logits = np.full((len(SETTINGS), 11), -np.inf, np.float32)
  logits[:, 7] = -3.0
  keys = jax.random.split(jax.random.key(0), len(SETTINGS))
  knobs = sampler.knobs(SETTINGS)
  tokens, log_probs = sample(keys, 0, jnp.asarray(logits), knobs)
  np.testing.assert_array_equal(tokens, [7] * len(SETTINGS))
  np.testing.assert_array_equal(log_probs, [0.0] * len(SETTINGS))


@pytest.mark.parametrize("s", SETTINGS)
def test_draws_follow_the_distribution(s):
  """Chi-square of 20000 draws against the closed form, at 4 sigma."""
  n, V = 20_000, 13
  logits = np.random.default_rng(2).normal(0, 1.5, V).astype(np.float32)
  keys = jax.random.split(jax.random.key(3), n)
  knobs = jax.tree.map(lambda x: jnp.repeat(x, n), sampler.knobs([s]))
  rows = jnp.broadcast_to(logits, (n, V))
  tokens, _ = sample(keys, 5, rows, knobs)
  wanted = distribution(logits, s) * n
  counts = np.bincount(tokens, minlength=V)
  assert counts[wanted == 0].sum() == 0
  drawn = wanted > 0
  chi2 = ((counts - wanted)[drawn] ** 2 / wanted[drawn]).sum()
  dof = drawn.sum() - 1
  assert chi2 <= dof + 4 * np.sqrt(2 * dof)


def test_the_chi_square_would_see_a_wrong_temperature():
  n, V = 20_000, 13
  logits = np.random.default_rng(2).normal(0, 1.5, V).astype(np.float32)
  keys = jax.random.split(jax.random.key(3), n)
  knobs = sampler.knobs([Sampling(temperature=1.05)] * n)
  rows = jnp.broadcast_to(logits, (n, V))
  tokens, _ = sample(keys, 5, rows, knobs)
  wanted = distribution(logits, Sampling()) * n
  counts = np.bincount(tokens, minlength=V)
  assert ((counts - wanted) ** 2 / wanted).sum() > V + 4 * np.sqrt(2 * V)


def test_a_row_does_not_see_its_neighbours(logits):
  """Nor the place in the batch, nor greedy rows beside it."""
  rows = SETTINGS[:4] + [Sampling(temperature=0.0)] + SETTINGS[5:]
  keys = jax.random.split(jax.random.key(4), len(rows))
  knobs = sampler.knobs(rows)
  together = sample(keys, 2, jnp.asarray(logits), knobs)
  for i in reversed(range(len(rows))):
    one = lambda x: x[i : i + 1]  # noqa: B023
    alone = sample(one(keys), 2, one(logits), jax.tree.map(one, knobs))
    assert alone[0] == together[0][i]
    np.testing.assert_allclose(
      alone[1][0], together[1][i], **tolerance("elementwise")
    )


def test_greedy_takes_the_first_of_equals():
  logits = jnp.array([[0.0, 2.0, 1.0, 2.0]])
  keys = jax.random.split(jax.random.key(0), 1)
  tokens, _ = sample(
    keys, 0, logits, sampler.knobs([Sampling(temperature=0.0)])
  )
  assert tokens == 1


def test_log_probs_are_the_models(logits):
  """Of the untouched distribution, whatever was drawn from."""
  keys = jax.random.split(jax.random.key(5), len(SETTINGS))
  tokens, log_probs = sample(
    keys, 0, jnp.asarray(logits), sampler.knobs(SETTINGS)
  )
  wanted = jax.nn.log_softmax(logits)[np.arange(len(logits)), tokens]
  np.testing.assert_allclose(log_probs, wanted, **tolerance("loss"))


def test_count_changes_the_draw():
  keys = jax.random.split(jax.random.key(6), 64)
  logits, knobs = jnp.zeros((64, 97)), sampler.knobs([Sampling()] * 64)
  first, _ = sample(keys, 0, logits, knobs)
  second, _ = sample(keys, 1, logits, knobs)
  assert (first == second).mean() < 0.1
