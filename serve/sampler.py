"""From logits to tokens: pure functions, one row of settings a row of logits.

The order is the one of `transformers`: temperature, top-k, top-p over what
top-k left, min-p. Tokens that tie with the last one kept are all kept, so
the result does not depend on the order of the vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from serve.config import Sampling


class Knobs(NamedTuple):
  """The settings of each row; fields of `serve.config.Sampling`, [B]."""

  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  min_p: jax.Array


def knobs(rows: list[Sampling]) -> Knobs:
  """Settings of rows as arrays, so that new values do not recompile."""
  return Knobs(
    temperature=jnp.asarray([r.temperature for r in rows], jnp.float32),
    top_k=jnp.asarray([r.top_k for r in rows], jnp.int32),
    top_p=jnp.asarray([r.top_p for r in rows], jnp.float32),
    min_p=jnp.asarray([r.min_p for r in rows], jnp.float32),
  )


def truncate(logits_BV: jax.Array, knobs: Knobs) -> jax.Array:
  """Logits of the distribution that is drawn from.

  Args:
    logits_BV: float32; -inf bars a token. At least one a row is finite.
    knobs: settings of each row. Temperature 0 counts as 1 here: `sample`
      takes the largest logit of such rows.

  Returns:
    float32 [B, V], -inf where a token is cut off; not normalised.
  """
  temperature = jnp.where(knobs.temperature == 0.0, 1.0, knobs.temperature)
  logits_BV = logits_BV / temperature[:, None]

  def top_k(logits_BV):
    k = jnp.where(knobs.top_k == 0, logits_BV.shape[1], knobs.top_k)
    return _keep_mass(logits_BV, jnp.ones_like(logits_BV), k)

  def top_p(logits_BV):
    kept = _keep_mass(logits_BV, jax.nn.softmax(logits_BV), knobs.top_p)
    return jnp.where(knobs.top_p[:, None] < 1.0, kept, logits_BV)

  def min_p(logits_BV):
    top = logits_BV.max(axis=1, keepdims=True)
    keep = logits_BV >= top + jnp.log(knobs.min_p)[:, None]
    return jnp.where(keep, logits_BV, -jnp.inf)

  # A switched-off filter costs nothing; a vocabulary is long.
  for used, cut in (
    (knobs.top_k > 0, top_k),
    (knobs.top_p < 1.0, top_p),
    (knobs.min_p > 0.0, min_p),
  ):
    logits_BV = jax.lax.cond(used.any(), cut, lambda x: x, logits_BV)
  return logits_BV


def sample(
  keys_B: jax.Array, count: jax.Array, logits_BV: jax.Array, knobs: Knobs
) -> tuple[jax.Array, jax.Array]:
  """Draws one token a row.

  A row reads its own key alone: its token does not depend on its neighbours.

  Args:
    keys_B: typed random keys, one a row.
    count: int32 [], how many tokens were drawn with these keys before.
    logits_BV: float32, as the model gave them.
    knobs: settings of each row.

  Returns:
    tokens int32 [B]; their log-probabilities float32 [B] under the model
    itself, that is before temperature and truncation.
  """

  def draw():
    # argmax(logits + Gumbel noise) is a draw from softmax(logits).
    def noise(key):
      key = jax.random.fold_in(key, count)
      return jax.random.gumbel(key, logits_BV.shape[1:])

    noise_BV = jax.vmap(noise)(keys_B)
    return jnp.argmax(truncate(logits_BV, knobs) + noise_BV, axis=1)

  greedy_B = _argmax(logits_BV)
  draws = knobs.temperature > 0.0
  drawn_B = jax.lax.cond(draws.any(), draw, lambda: greedy_B)
  tokens_B = jnp.where(draws, drawn_B, greedy_B).astype(jnp.int32)
  return tokens_B, chosen_log_probs(logits_BV, tokens_B)


def _argmax(logits_BV: jax.Array) -> jax.Array:
  """The first largest logit of each row, int32 [B].

  By blocks: of 32,000 logits XLA on a CPU takes the maximum in 17 us and the
  argmax in 142.
  """
  B, V = logits_BV.shape
  size = 128
  fill = ((0, 0), (0, -V % size))
  blocks = jnp.pad(logits_BV, fill, constant_values=-jnp.inf)
  blocks = blocks.reshape(B, -1, size)
  block_B = jnp.argmax(blocks.max(axis=2), axis=1)
  best = jnp.take_along_axis(blocks, block_B[:, None, None], axis=1)[:, 0]
  return (block_B * size + jnp.argmax(best, axis=1)).astype(jnp.int32)


def chosen_log_probs(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
  """log softmax(logits)[token] of each row, float32 [B]."""
  chosen_B = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=1)[:, 0]
  return chosen_B - jax.nn.logsumexp(logits_BV, axis=1)


def _keep_mass(logits_BV, mass_BV, needed_B):
  """Keeps the largest logits of a row until their mass reaches `needed`.

  Finds the smallest logit to keep bit by bit, in 32 passes over the row,
  where sorting a vocabulary is slow, on a TPU above all. Keeps at least the
  largest, and all where the mass of all is too little.
  """
  order_BV = _ordered_bits(logits_BV)

  def add_bit(i, least_B):
    candidate_B = least_B | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
    kept_BV = jnp.where(order_BV >= candidate_B[:, None], mass_BV, 0.0)
    enough_B = kept_BV.sum(axis=1) >= needed_B
    return jnp.where(enough_B, candidate_B, least_B)

  least_B = jnp.zeros(logits_BV.shape[0], jnp.uint32)
  least_B = jax.lax.fori_loop(0, 32, add_bit, least_B)
  least_B = jnp.minimum(least_B, order_BV.max(axis=1))
  return jnp.where(order_BV >= least_B[:, None], logits_BV, -jnp.inf)


def _ordered_bits(x):
  """uint32 in the order of the float32 values."""
  x = jnp.where(x == 0.0, 0.0, x)  # -0.0 is no less than 0.0
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  negative = bits >> 31 == 1
  return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))
