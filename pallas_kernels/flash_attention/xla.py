"""Attention in chunks of queries, in plain XLA: O(T) memory, any platform.

Probabilities exist for a chunk of queries at a time, forward and backward.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot
from pallas_kernels.flash_attention.dropout import drop
from pallas_kernels.flash_attention.options import (
  HIDDEN,
  LEAST,
  Options,
  Rows,
  visible,
)

# Queries whose scores exist at one time,
CHUNK = 128
# or fewer, where a row of the batch would have more scores than that.
MAX_SCORES = 2**22
# Up to so many chunks are unrolled, each with just the keys it can see.
MAX_UNROLLED = 8
ROWS_AXIS = 1  # of laid vectors


def laid(options: Options, x_BTNH: jax.Array) -> jax.Array:
  """As products take it."""
  return x_BTNH.astype(options.operands)


def unlaid(x_BTNH: jax.Array) -> jax.Array:
  """The way back."""
  return x_BTNH


def values(
  options: Options,
  offset: int | None,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  queries: Rows,
  keys: Rows,
  words_2BNT: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Output [B, T, N, H] and logsumexp [B, T, N]; see `attend`."""
  B, T, N, H = q_BTNH.shape
  S, K = k_BSKH.shape[1:3]
  q = q_BTNH.reshape(B, T, K, N // K, H)
  words = _by_query(words_2BNT, K)

  def chunk(carry, part, first, last):
    """Output and logsumexp of one chunk of queries."""
    q, queries, words = part
    q = _heads_first(q)
    k, v = k_BSKH[:, first:last], v_BSKH[:, first:last]
    seen_keys = keys.cut(first, last)
    scores, _ = _scores(options, q, k, queries, seen_keys)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LEAST)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = jnp.where(total == 0.0, 1.0, total)
    dropped = _drop(options, weights, words, seen_keys)
    out = dot("BKGTS,BSKH->BTKGH", dropped, v, options.operands)
    lse = _rows_first(top + jnp.log(total))
    # Not the scores: an output has fewer numbers than a row of them.
    out = out / _rows_first(total)[..., None]
    return carry, (out.astype(options.out_dtype), lse)

  rows = q, queries, words
  _, (out, lse) = _over_chunks(options, offset, S, chunk, None, rows)
  return out.reshape(B, T, N, H), lse.reshape(B, T, N)


def gradients(
  options: Options,
  offset: int | None,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  g_BTNH: jax.Array,
  lse_BTN: jax.Array,
  delta_BTN: jax.Array,
  queries: Rows,
  keys: Rows,
  words_2BNT: jax.Array | None,
  dtype: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """By queries, keys and values; see `attend`."""
  B, T, N, H = q_BTNH.shape
  S, K = k_BSKH.shape[1:3]
  by_group = lambda x: x.reshape(B, T, K, N // K, *x.shape[3:])

  def chunk(sums, part, first, last):
    """Adds a chunk's share to dk and dv; gives its dq."""
    q, queries, words, g, delta, lse = part
    q, g = _heads_first(q), _heads_first(g)
    k, v = k_BSKH[:, first:last], v_BSKH[:, first:last]
    seen_keys = keys.cut(first, last)
    scores, slope = _scores(options, q, k, queries, seen_keys)
    weights = jnp.exp(scores - _rows_last(lse))
    drop = lambda x: _drop(options, x, words, seen_keys)
    # Scores stay as they lie: second operands, summed in the order of theirs.
    dv = dot("BKGTH,BKGTS->BSKH", g, drop(weights), options.operands)
    dp = drop(dot("BKGTH,BSKH->BKGTS", g, v, options.operands))
    ds = weights * (dp - _rows_last(delta)) * slope
    dq = dot("BKGTS,BSKH->BTKGH", ds, k, options.operands)
    dk = dot("BKGTH,BKGTS->BSKH", q, ds, options.operands)
    if sums is None:
      fill = [(0, 0), (first, S - last), (0, 0), (0, 0)]
      return (jnp.pad(dk, fill), jnp.pad(dv, fill)), dq
    dk_sum, dv_sum = sums
    dk_sum = dk_sum.at[:, first:last].add(dk)
    dv_sum = dv_sum.at[:, first:last].add(dv)
    return (dk_sum, dv_sum), dq

  zeros = jnp.zeros(k_BSKH.shape, jnp.float32)
  q, g, lse, delta = map(by_group, (q_BTNH, g_BTNH, lse_BTN, delta_BTN))
  rows = q, queries, _by_query(words_2BNT, K), g, delta, lse
  sums, dq = _over_chunks(options, offset, S, chunk, (zeros, zeros), rows)
  return tuple(x.astype(dtype) for x in (dq.reshape(B, T, N, H), *sums))


def _over_chunks(options, offset, S, step, zeros, rows):
  """Runs `step` over chunks of query rows, the last of few chunks first.

  Args:
    options: what is asked.
    offset: see `attend`.
    S: number of keys.
    step: (carry, part, first, last) -> (carry, outputs): `part` holds some
      queries, which see keys [first, last) at most. The first of few has the
      carry None and, under a causal mask, most keys.
    zeros: the carry at the start of a loop over many chunks.
    rows: tree of arrays [B, T, ...], the queries [B, T, K, G, H] first.

  Returns:
    The last carry, and the outputs as arrays [B, T, ...].
  """
  _, T, K, G, _ = rows[0].shape
  size = min(CHUNK, max(8, MAX_SCORES // (K * G * S)))
  num_chunks = -(-T // size)
  if num_chunks <= MAX_UNROLLED:
    carry, parts = None, []
    for start in reversed(range(0, T, size)):
      stop = min(start + size, T)
      first, last = 0, S
      if offset is not None and options.right is not None:
        last = min(S, max(1, stop + offset + options.right))
      if offset is not None and options.left is not None:
        first = max(0, min(start + offset - options.left, last - 1))
      part = jax.tree.map(lambda x: x[:, start:stop], rows)  # noqa: B023
      carry, outputs = step(carry, part, first, last)
      parts.append(outputs)
    join = lambda *parts: jnp.concatenate(parts, axis=1)
    return carry, jax.tree.map(join, *reversed(parts))

  def split(x):
    """[B, T, ...] -> [chunks, B, size, ...]; zeros fill the last chunk."""
    fill = [(0, 0)] * x.ndim
    fill[1] = (0, num_chunks * size - T)
    x = jnp.pad(x, fill)
    x = x.reshape(x.shape[0], num_chunks, size, *x.shape[2:])
    return jnp.swapaxes(x, 0, 1)

  def join(x):
    x = jnp.swapaxes(x, 0, 1)
    return x.reshape(x.shape[0], num_chunks * size, *x.shape[3:])[:, :T]

  body = lambda carry, part: step(carry, part, 0, S)
  carry, outputs = jax.lax.scan(body, zeros, jax.tree.map(split, rows))
  return carry, jax.tree.map(join, outputs)


def _scores(options, q, k, queries, keys):
  """Scores [B, K, G, T, S], hidden ones at HIDDEN, and d score / d (q k)."""
  if q.shape[3] == 1:
    # Compilers transpose the second operand: the short one.
    scores = dot("BSKH,BKGTH->BKGTS", k, q, options.operands)
  else:
    scores = dot("BKGTH,BSKH->BKGTS", q, k, options.operands)
  scores = scores * options.scale
  slope = jnp.float32(options.scale)
  if options.soft_cap is not None:
    tanh = jnp.tanh(scores / options.soft_cap)
    scores = options.soft_cap * tanh
    slope = slope * (1.0 - jnp.square(tanh))
  seen = visible(options, queries, keys)[:, None, None]
  return jnp.where(seen, scores, HIDDEN), slope


def _by_query(words_2BNT: jax.Array | None, K: int):
  """[2, B, N, T] -> [B, T, K, G, 2], a row of numbers like the others."""
  if words_2BNT is None:
    return None
  _, B, N, T = words_2BNT.shape
  return words_2BNT.transpose(1, 3, 2, 0).reshape(B, T, K, N // K, 2)


def _drop(options, weights, words_BTKG2, keys: Rows):
  """Dropout of weights [B, K, G, T, S]."""
  if words_BTKG2 is None:
    return weights
  columns = tuple(_rows_last(words_BTKG2[..., n]) for n in range(2))
  index = keys.index[:, None, None, None]
  return drop(weights, columns, index, options.dropout_rate)


def _heads_first(x_BTKGH: jax.Array) -> jax.Array:
  """[B, T, K, G, H] -> [B, K, G, T, H], the order of scores."""
  return jnp.transpose(x_BTKGH, (0, 2, 3, 1, 4))


def _rows_first(x_BKGT1: jax.Array) -> jax.Array:
  """[B, K, G, T, 1] -> [B, T, K, G]: of scores, to stand beside outputs."""
  return jnp.transpose(x_BKGT1[..., 0], (0, 3, 1, 2))


def _rows_last(x_BTKG: jax.Array) -> jax.Array:
  """[B, T, K, G] -> [B, K, G, T, 1], to stand beside scores."""
  return jnp.transpose(x_BTKG, (0, 2, 3, 1))[..., None]
