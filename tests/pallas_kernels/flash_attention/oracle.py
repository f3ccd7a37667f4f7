"""Attention and its gradients in float64 numpy, head by head."""

import numpy as np


def attention(q, k, v, g, seen, *, scale, soft_cap=None, keep=None, rate=0.0):
  """Output and gradients of sum(g * output).

  Args:
    q: [B, T, N, H].
    k: [B, S, K, H].
    v: [B, S, K, H].
    g: [B, T, N, H].
    seen: bool [B, T, S].
    scale: of the scores.
    soft_cap: of the scores.
    keep: bool [B, N, T, S], what dropout keeps.
    rate: of dropout.

  Returns:
    (out, dq, dk, dv), shaped as q, q, k, v.
  """
  q, k, v, g = (np.float64(x) for x in (q, k, v, g))
  out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
  B, _, N, _ = q.shape
  group = N // k.shape[2]
  for b in range(B):
    for n in range(N):
      q_, k_, v_ = q[b, :, n], k[b, :, n // group], v[b, :, n // group]
      scores = scale * q_ @ k_.T
      slope = np.full_like(scores, scale)
      if soft_cap is not None:
        tanh = np.tanh(scores / soft_cap)
        scores, slope = soft_cap * tanh, slope * (1 - tanh**2)
      probs = np.zeros_like(scores)
      for t, row in enumerate(seen[b]):
        if row.any():
          e = np.exp(scores[t, row] - scores[t, row].max())
          probs[t, row] = e / e.sum()
      factor = 1.0 if keep is None else keep[b, n] / (1 - rate)
      out[b, :, n] = (probs * factor) @ v_
      dv[b, :, n // group] += (probs * factor).T @ g[b, :, n]
      dp = (g[b, :, n] @ v_.T) * factor
      ds = probs * (dp - (probs * dp).sum(-1, keepdims=True)) * slope
      dq[b, :, n] = ds @ k_
      dk[b, :, n // group] += ds.T @ q_
  return out, dq, dk, dv
