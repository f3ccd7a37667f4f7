"""Attention and its gradients in float64 numpy, head by head."""

import numpy as np


def attention(
  q,
  k,
  v,
  g,
  seen,
  *,
  scale,
  soft_cap=None,
  sinks=None,
  g_lse=0.0,
  keep=None,
  rate=0.0,
):
  """Output and gradients of sum(g * output) + sum(g_lse * logsumexp).

  Args:
    q: [B, T, N, H].
    k: [B, S, K, H].
    v: [B, S, K, H].
    g: [B, T, N, H].
    seen: bool [B, T, S].
    scale: of the scores.
    soft_cap: of the scores.
    sinks: [N], one more score a head, without a value.
    g_lse: [B, T, N], or a number.
    keep: bool [B, N, T, S], what dropout keeps.
    rate: of dropout.

  Returns:
    dict of out, lse (-inf where nothing is seen), dq, dk, dv and, with sinks,
    dsinks.
  """
  q, k, v, g = (np.float64(x) for x in (q, k, v, g))
  out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
  B, T, N, _ = q.shape
  g_lse = np.broadcast_to(g_lse, (B, T, N))
  lse = np.full((B, T, N), -np.inf)
  dsinks = np.zeros(N)
  group = N // k.shape[2]
  for b in range(B):
    for n in range(N):
      q_, k_, v_ = q[b, :, n], k[b, :, n // group], v[b, :, n // group]
      scores = scale * q_ @ k_.T
      slope = np.full_like(scores, scale)
      if soft_cap is not None:
        tanh = np.tanh(scores / soft_cap)
        scores, slope = soft_cap * tanh, slope * (1 - tanh**2)
      probs, sink_probs = np.zeros_like(scores), np.zeros(T)
      for t, row in enumerate(seen[b]):
        all_scores = scores[t, row]
        if sinks is not None:
          all_scores = np.append(all_scores, sinks[n])
        if all_scores.size:
          top = all_scores.max()
          e = np.exp(all_scores - top)
          lse[b, t, n] = top + np.log(e.sum())
          e /= e.sum()
          probs[t, row] = e[: row.sum()]
          if sinks is not None:
            sink_probs[t] = e[-1]
      factor = 1.0 if keep is None else keep[b, n] / (1 - rate)
      out[b, :, n] = (probs * factor) @ v_
      dv[b, :, n // group] += (probs * factor).T @ g[b, :, n]
      dp = (g[b, :, n] @ v_.T) * factor
      delta = (probs * dp).sum(-1) - g_lse[b, :, n]
      ds = probs * (dp - delta[:, None]) * slope
      dsinks[n] -= (sink_probs * delta).sum()
      dq[b, :, n] = ds @ k_
      dk[b, :, n // group] += ds.T @ q_
  found = dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv)
  return found if sinks is None else found | dict(dsinks=dsinks)


def seen(
  T,
  S,
  left,
  right,
  *,
  offset=0,
  q_positions=None,
  k_positions=None,
  q_segment_ids=None,
  k_segment_ids=None,
):
  """Which keys each query may see, bool [1 or B, T, S]."""
  if q_positions is None:
    q_positions, k_positions = np.arange(T)[None] + offset, np.arange(S)[None]
  query, key = q_positions[:, :, None], k_positions[:, None]
  found = np.ones(np.broadcast_shapes(query.shape, key.shape), bool)
  if left is not None:
    found &= key >= query - left
  if right is not None:
    found &= key <= query + right
  if q_segment_ids is not None:
    query, key = q_segment_ids[:, :, None], k_segment_ids[:, None]
    found = found & (query == key) & (key > 0)
  return found


def keep(words, S, rate):
  """What dropout keeps, by 64-bit arithmetic: bool [B, N, T, S]."""
  first, second = (np.asarray(x, np.uint64)[..., None] for x in words)
  low = np.uint64(0xFFFFFFFF)
  x = (first + np.arange(S, dtype=np.uint64) * np.uint64(0x9E3779B9)) & low
  x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B) & low) ^ second
  x = (x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35) & low
  x ^= x >> np.uint64(16)
  return x >> np.uint64(1) >= np.uint64(int(rate * 2**31))
