"""Beam search over any function from tokens to logits.

The rules are those of `transformers` with early_stopping="never": of all
continuations of W beams the W best that do not stop live on, a stop among
the W best is a finished answer, and the search of a row ends when no living
beam can still overtake the worst of W finished ones.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Beams(NamedTuple):
  """Answers of each row, best first; W a row.

  Attributes:
    ids: int32 [B, W, T]; -1 after the end.
    log_probs: float32 [B, W, T] of each token; 0 after the end.
    score: float32 [B, W]: sum of log_probs / length ** length_penalty, or
      the sum alone while a beam lives. -inf: there is no such answer.
  """

  ids: jax.Array
  log_probs: jax.Array
  score: jax.Array


def search(
  step,
  take,
  state,
  logits_BV: jax.Array,
  *,
  num_beams: int,
  max_new_tokens: int,
  length_penalty: float | jax.Array,
  stop_ids: jax.Array,
) -> Beams:
  """The best continuations that W beams find.

  Args:
    step: (state, tokens_R) -> (logits_RV, state) appends a token to each of
      the R = B W beams.
    take: (state, rows_R) -> the state of these rows, in this order.
    state: what `step` carries, for R rows; those of one prompt are equal.
    logits_BV: float32, of the first new token.
    num_beams: W.
    max_new_tokens: T; beams of this length are finished.
    length_penalty: above 0 favours long answers.
    stop_ids: int32 [n], tokens that finish a beam; -1 matches none.

  Returns:
    The W best finished beams of each row, by score.
  """
  B, V = logits_BV.shape
  W, T = num_beams, max_new_tokens
  # Even if the best are all stops, W that live on are among so many.
  num_candidates = min(W * (1 + stop_ids.size), W * V)
  empty = Beams(
    ids=jnp.full((B, W, T), -1, jnp.int32),
    log_probs=jnp.zeros((B, W, T), jnp.float32),
    score=jnp.full((B, W), -jnp.inf),
  )
  # Beams are equal at first: let one of them continue.
  living = empty._replace(score=empty.score.at[:, 0].set(0.0))
  first_row = jnp.arange(B)[:, None] * W

  def searching(carry):
    i, _, _, _, _, done_B = carry
    return (i < T) & ~done_B.all()

  def advance(carry):
    i, state, logits_RV, living, finished, done_B = carry
    log_probs_BWV = jax.nn.log_softmax(logits_RV).reshape(B, W, V)
    totals_BWV = living.score[:, :, None] + log_probs_BWV
    flat_BC = totals_BWV.reshape(B, W * V)
    total_BC, index_BC = jax.lax.top_k(flat_BC, num_candidates)
    parent_BC, token_BC = index_BC // V, (index_BC % V).astype(jnp.int32)
    log_prob_BC = jnp.take_along_axis(
      log_probs_BWV.reshape(B, W * V), index_BC, axis=1
    )
    candidates = _pick(living, parent_BC)
    candidates = Beams(
      ids=candidates.ids.at[:, :, i].set(token_BC),
      log_probs=candidates.log_probs.at[:, :, i].set(log_prob_BC),
      score=total_BC,
    )
    hits = token_BC[:, :, None] == stop_ids[None, None]
    stops_BC = hits.any(axis=-1) | (i + 1 == T)

    ended_BC = stops_BC & (jnp.arange(num_candidates)[None] < W)
    length = (i + 1).astype(jnp.float32)
    scores_BC = jnp.where(ended_BC, total_BC / length**length_penalty, -jnp.inf)
    both = jax.tree.map(
      lambda a, b: jnp.concatenate([a, b], axis=1),
      finished,
      candidates._replace(score=scores_BC),
    )
    better, _ = _best(both, W)
    finished = jax.tree.map(
      lambda new, old: jnp.where(_like(done_B, new), old, new),
      better,
      finished,
    )

    go_on = candidates._replace(score=jnp.where(stops_BC, -jnp.inf, total_BC))
    living, chosen_BW = _best(go_on, W)
    tokens_BW = jnp.take_along_axis(token_BC, chosen_BW, axis=1)
    parents_BW = jnp.take_along_axis(parent_BC, chosen_BW, axis=1)
    # A beam's total only falls; a positive penalty rewards the full length.
    reach = jnp.where(length_penalty > 0.0, float(T), length)
    hope_B = living.score[:, 0] / reach**length_penalty
    done_B |= hope_B <= finished.score[:, -1]

    state = take(state, (first_row + parents_BW).reshape(B * W))
    logits_RV, state = step(state, tokens_BW.reshape(B * W))
    return i + 1, state, logits_RV, living, finished, done_B

  logits_RV = jnp.repeat(logits_BV, W, axis=0)
  done_B = jnp.zeros((B,), bool)
  carry = jnp.int32(0), state, logits_RV, living, empty, done_B
  return jax.lax.while_loop(searching, advance, carry)[4]


def _best(beams: Beams, num: int) -> tuple[Beams, jax.Array]:
  """The `num` beams of each row with the highest score, and their index."""
  _, index = jax.lax.top_k(beams.score, num)
  return _pick(beams, index), index


def _pick(beams: Beams, index) -> Beams:
  """Beams of each row by index [B, n]."""
  pick = jax.vmap(lambda x, i: x[i])
  return jax.tree.map(lambda x: pick(x, index), beams)


def _like(flag_B, x):
  """A flag a row, shaped to select rows of `x`."""
  return flag_B.reshape((-1,) + (1,) * (x.ndim - 1))
