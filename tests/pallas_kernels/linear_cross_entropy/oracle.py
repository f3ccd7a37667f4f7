"""The op and its gradients in float64 numpy, all logits at once."""

import numpy as np


def _logits(x, head, layout, scale, soft_cap):
  """x, the head as [V, D], logits [B, T, V] and their slope."""
  x, head = np.float64(x), np.float64(head)
  head = head if layout == "VD" else head.T
  logits = scale * np.einsum("btd,vd->btv", x, head)
  slope = np.full_like(logits, scale)
  if soft_cap is not None:
    tanh = np.tanh(logits / soft_cap)
    logits, slope = soft_cap * tanh, slope * (1 - tanh**2)
  return x, head, logits, slope


def _statistics(logits, targets):
  """Logsumexp, softmax, one-hot targets, logit of the target."""
  top = logits.max(-1, keepdims=True)
  lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
  probs = np.exp(logits - lse[..., None])
  hot = np.arange(logits.shape[-1]) == np.asarray(targets)[..., None]
  return lse, probs, hot, (logits * hot).sum(-1)


def _gradients(x, head, layout, dlogits):
  dx = np.einsum("btv,vd->btd", dlogits, head)
  dhead = np.einsum("btv,btd->vd", dlogits, x)
  return dx, dhead if layout == "VD" else dhead.T


def cross_entropy(
  x, head, targets, weights, *, layout, z_loss=0.0, scale=1.0, soft_cap=None
):
  """dict of loss, nll, z_loss and the gradients dx, dhead, dweights."""
  weights = np.float64(weights)
  x, head, logits, slope = _logits(x, head, layout, scale, soft_cap)
  lse, probs, hot, picked = _statistics(logits, targets)
  nll, z = lse - picked, z_loss * lse**2
  dlogits = probs * (1 + 2 * z_loss * lse)[..., None] - hot
  dlogits = dlogits * weights[..., None] * slope
  dx, dhead = _gradients(x, head, layout, dlogits)
  return dict(
    loss=(weights * (nll + z)).sum(),
    nll=(weights * nll).sum(),
    z_loss=(weights * z).sum(),
    dx=dx,
    dhead=dhead,
    dweights=nll + z,
  )


def log_probs(x, head, targets, g, *, layout, scale=1.0, soft_cap=None):
  """dict of values and all [B, T, V] of them; dx, dhead of sum(g values)."""
  x, head, logits, slope = _logits(x, head, layout, scale, soft_cap)
  lse, probs, hot, picked = _statistics(logits, targets)
  dlogits = (hot - probs) * np.float64(g)[..., None] * slope
  dx, dhead = _gradients(x, head, layout, dlogits)
  return dict(
    values=picked - lse, all=logits - lse[..., None], dx=dx, dhead=dhead
  )
