"""Attention in chunks of queries, in plain XLA: O(T) memory, any platform.

Forward keeps the output and the logsumexp of each row; backward recomputes
the probabilities chunk by chunk (arXiv:2205.14135, algorithm 4, with the keys
in one block).
"""

import functools

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

# Queries whose scores exist at one time.
CHUNK = 128
# Up to so many chunks are unrolled, each with just the keys it can see.
MAX_UNROLLED = 8


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
  options: Options,
  offset: int | None,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  queries: Rows,
  keys: Rows,
  words_2BNT: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Output [B, T, N, H] and logsumexp [B, T, N].

  Args:
    options: what is asked.
    offset: position of the first query where positions just count up, and
      those of keys do from 0; None: they are arrays.
    q_BTNH: queries.
    k_BSKH: keys.
    v_BSKH: values.
    queries: where each query stands.
    keys: where each key stands.
    words_2BNT: of `dropout.row_words`; None: no dropout.
  """
  arrays = q_BTNH, k_BSKH, v_BSKH, queries, keys, words_2BNT
  return _attend_fwd(options, offset, *arrays)[0]


def _attend_fwd(options, offset, q, k, v, queries, keys, words):
  B, T, N, H = q.shape
  S, K = k.shape[1:3]
  dtypes = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), (q, k, v))
  q = q.astype(options.operands).reshape(B, T, K, N // K, H)
  k, v = k.astype(options.operands), v.astype(options.operands)
  words = _by_query(words, K)

  def chunk(carry, part, first, last):
    """Output and logsumexp of one chunk of queries."""
    q, queries, words = part
    q = _heads_first(q)
    scores, _ = _scores(
      options, q, k[:, first:last], queries, keys.cut(first, last)
    )
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LEAST)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = jnp.where(total == 0.0, 1.0, total)
    dropped = _drop(options, weights, words, first)
    out = dot("BKGTS,BSKH->BTKGH", dropped, v[:, first:last], options.operands)
    lse = _rows_first(top + jnp.log(total))
    # Not the scores: an output has fewer numbers than a row of them.
    out = out / _rows_first(total)[..., None]
    return carry, (out.astype(options.out_dtype), lse)

  rows = q, queries, words
  _, (out, lse) = _over_chunks(options, offset, S, chunk, None, rows)
  out, by_head = out.reshape(B, T, N, H), lse.reshape(B, T, N)
  saved = q, k, v, queries, keys, words, out, lse, dtypes
  return (out, by_head), saved


def _attend_bwd(options, offset, saved, cotangents):
  q, k, v, queries, keys, words, out, lse, dtypes = saved
  g, g_lse = cotangents
  B, T, K, G, H = q.shape
  S = k.shape[1]
  delta = jnp.sum(g.astype(jnp.float32) * out, axis=-1) - g_lse
  delta = delta.reshape(B, T, K, G)
  g = g.astype(options.operands).reshape(q.shape)

  def chunk(sums, part, first, last):
    """Adds a chunk's share to dk and dv; gives its dq."""
    q, queries, words, g, delta, lse = part
    q, g = _heads_first(q), _heads_first(g)
    k_seen, v_seen = k[:, first:last], v[:, first:last]
    scores, slope = _scores(options, q, k_seen, queries, keys.cut(first, last))
    weights = jnp.exp(scores - _rows_last(lse))
    drop = lambda x: _drop(options, x, words, first)
    # Scores stay as they lie: second operands, summed in the order of theirs.
    dv = dot("BKGTH,BKGTS->BSKH", g, drop(weights), options.operands)
    dp = drop(dot("BKGTH,BSKH->BKGTS", g, v_seen, options.operands))
    ds = weights * (dp - _rows_last(delta)) * slope
    dq = dot("BKGTS,BSKH->BTKGH", ds, k_seen, options.operands)
    dk = dot("BKGTH,BKGTS->BSKH", q, ds, options.operands)
    if sums is None:
      fill = [(0, 0), (first, S - last), (0, 0), (0, 0)]
      return (jnp.pad(dk, fill), jnp.pad(dv, fill)), dq
    dk_sum, dv_sum = sums
    dk_sum = dk_sum.at[:, first:last].add(dk)
    dv_sum = dv_sum.at[:, first:last].add(dv)
    return (dk_sum, dv_sum), dq

  zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  rows = q, queries, words, g, delta, lse
  (dk, dv), dq = _over_chunks(options, offset, S, chunk, zeros, rows)
  grads = dq.reshape(B, T, K * G, H), dk, dv
  cast = lambda x, like: x.astype(like.dtype)
  return *map(cast, grads, dtypes), None, None, None


attend.defvjp(_attend_fwd, _attend_bwd)


def _over_chunks(options, offset, S, step, zeros, rows):
  """Runs `step` over chunks of query rows, the last of few chunks first.

  Args:
    options: what is asked.
    offset: as in `attend`.
    S: number of keys.
    step: (carry, part, first, last) -> (carry, outputs): `part` holds some
      queries, which see keys [first, last) at most. The first of few has the
      carry None and, under a causal mask, most keys.
    zeros: the carry at the start of a loop over many chunks.
    rows: tree of arrays [B, T, ...].

  Returns:
    The last carry, and the outputs as arrays [B, T, ...].
  """
  T = jax.tree.leaves(rows)[0].shape[1]
  num_chunks = -(-T // CHUNK)
  if num_chunks <= MAX_UNROLLED:
    carry, parts = None, []
    for start in reversed(range(0, T, CHUNK)):
      stop = min(start + CHUNK, T)
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
    """[B, T, ...] -> [chunks, B, CHUNK, ...]; zeros fill the last chunk."""
    fill = [(0, 0)] * x.ndim
    fill[1] = (0, num_chunks * CHUNK - T)
    x = jnp.pad(x, fill)
    x = x.reshape(x.shape[0], num_chunks, CHUNK, *x.shape[2:])
    return jnp.swapaxes(x, 0, 1)

  def join(x):
    x = jnp.swapaxes(x, 0, 1)
    return x.reshape(x.shape[0], num_chunks * CHUNK, *x.shape[3:])[:, :T]

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


def _drop(options, weights, words_BTKG2, first):
  """Dropout of weights [B, K, G, T, S], of keys from `first` on."""
  if words_BTKG2 is None:
    return weights
  columns = tuple(_rows_last(words_BTKG2[..., n]) for n in range(2))
  slots = first + jnp.arange(weights.shape[-1], dtype=jnp.int32)
  slots = slots.reshape(1, 1, 1, 1, -1)
  return drop(weights, columns, slots, options.dropout_rate)


def _heads_first(x_BTKGH: jax.Array) -> jax.Array:
  """[B, T, K, G, H] -> [B, K, G, T, H], the order of scores."""
  return jnp.transpose(x_BTKGH, (0, 2, 3, 1, 4))


def _rows_first(x_BKGT1: jax.Array) -> jax.Array:
  """[B, K, G, T, 1] -> [B, T, K, G]: of scores, to stand beside outputs."""
  return jnp.transpose(x_BKGT1[..., 0], (0, 3, 1, 2))


def _rows_last(x_BTKG: jax.Array) -> jax.Array:
  """[B, T, K, G] -> [B, K, G, T, 1], to stand beside scores."""
  return jnp.transpose(x_BTKG, (0, 2, 3, 1))[..., None]
