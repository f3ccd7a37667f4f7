"""Beam search against enumeration of all answers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serve import beam
from tests.tolerances import tolerance

V, T, STOP = 4, 3, 1


def table(seed, rows):
  """Logits of the next token for every (row, up to T - 1 tokens)."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(0, 2, (rows, (V + 1) ** T, V)), jnp.float32)


@functools.partial(jax.jit, static_argnames="num_beams")
def _search(logits, penalty, num_beams):
  """Searches in a table: the state is the row and the tokens so far."""
  B = logits.shape[0]

  def step(state, tokens_R):
    row, code = state
    code = code * (V + 1) + tokens_R + 1
    return logits[row, code], (row, code)

  rows = jnp.repeat(jnp.arange(B), num_beams)
  return beam.search(
    step,
    lambda state, rows: (state[0][rows], state[1][rows]),
    (rows, jnp.zeros_like(rows)),
    logits[:, 0],
    num_beams=num_beams,
    max_new_tokens=T,
    length_penalty=penalty,
    stop_ids=jnp.array([STOP, -1], jnp.int32),
  )


def run(logits, num_beams, penalty):
  """The beams on the host."""
  return jax.device_get(_search(logits, penalty, num_beams=num_beams))


def everything(logits, penalty):
  """All answers of one row, best first: (score, ids, log-probs)."""
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  answers = []
  for n in range(1, T + 1):
    for ids in itertools.product(range(V), repeat=n):
      if STOP in ids[:-1] or (n < T and ids[-1] != STOP):
        continue
      code, terms = 0, []
      for token in ids:
        terms.append(log_probs[code, token])
        code = code * (V + 1) + token + 1
      answers.append((sum(terms) / n**penalty, ids, terms))
  return sorted(answers, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -1.0])
def test_wide_search_finds_the_best(penalty):
  """With as many beams as there are answers nothing can be missed."""
  logits = table(0, rows=3)
  beams = run(logits, 40, penalty)
  for row in range(3):
    answers = everything(logits[row], penalty)
    assert len(answers) == 40
    for w in range(5):
      score, ids, terms = answers[w]
      got = beams.ids[row, w]
      assert tuple(got[got >= 0]) == ids
      np.testing.assert_allclose(
        beams.score[row, w], score, **tolerance("loss")
      )
      np.testing.assert_allclose(
        beams.log_probs[row, w, : len(ids)], terms, **tolerance("loss")
      )


def test_more_beams_than_answers():
  """The places that are left over have score -inf."""
  beams = run(table(1, rows=1), 64, 1.0)
  assert np.isfinite(beams.score).sum() == 40
  assert np.isinf(beams.score[0, 40:]).all()


def test_one_beam_is_greedy():
  logits = table(2, rows=5)
  beams = run(logits, 1, 1.0)
  for row in range(5):
    code, ids = 0, []
    while len(ids) < T and STOP not in ids:
      ids.append(int(logits[row, code].argmax()))
      code = code * (V + 1) + ids[-1] + 1
    got = beams.ids[row, 0]
    assert got[got >= 0].tolist() == ids


def test_a_row_does_not_see_its_neighbours():
  """Rows end at different times; those that are done stay as they are."""
  logits = table(3, rows=6)
  together = run(logits, 3, 1.0)
  ends = (together.ids[:, 0] >= 0).sum(axis=1)
  assert len(set(ends.tolist())) > 1
  for row in range(6):
    alone = run(logits[row : row + 1], 3, 1.0)
    np.testing.assert_array_equal(alone.ids[0], together.ids[row])


def test_length_penalty_changes_the_winner():
  logits = table(0, rows=3)
  short, long = run(logits, 40, -1.0), run(logits, 40, 2.5)
  lengths = lambda beams: (beams.ids[:, 0] >= 0).sum()
  assert lengths(short) < lengths(long)
