"""A mixture of experts token by token, in numpy float64.

All functions are analytic where no choice changes, so that a derivative is the
imaginary part of a complex step: exact, and nothing of it was written twice.
"""

import math

import numpy as np

from model.config import Moe

ACTIVATIONS = {
  "silu": lambda x: x / (1 + np.exp(-x)),
  "relu2": lambda x: np.where(x.real > 0, x, 0) ** 2,
}


def layer(weights, x, segments, numbers, moe: Moe, activation: str):
  """The output [B, T, D] and the statistics of `model.moe.MoE`.

  Args:
    weights: "router" [D, E], "bias" [E] or None, "up", "down", "gate" or None;
      "shared": the same of one MLP, or None.
    x: [B, T, D]; whatever stands in padding is not looked at.
    segments: [B, T], 0 is padding.
    numbers: [B, T], the order of a row's tokens.
    moe: the settings.
    activation: of the experts.
  """
  (B, T, _), E, k = x.shape, moe.num_experts, moe.num_active
  capacity = math.inf
  if moe.capacity_factor is not None:
    capacity = math.ceil(moe.capacity_factor * k * T / E)
  act = ACTIVATIONS[activation]

  def feed(w, x):
    up = x @ w["up"]
    hidden = act(up) if w["gate"] is None else act(x @ w["gate"]) * up
    return hidden @ w["down"]

  y = np.zeros(x.shape, complex)
  stats = {
    "counts_BE": np.zeros((B, E)),
    "dropped_B": np.zeros(B),
    "z_B": np.zeros(B, complex),
    "balance_B": np.zeros(B, complex),
  }
  for b in range(B):
    real = [t for t in np.argsort(numbers[b]) if segments[b, t]]
    taken, shares = np.zeros(E), np.zeros(E, complex)
    for t in real:
      logits = x[b, t] @ weights["router"]
      exp = np.exp(logits - logits.real.max())
      if moe.scores == "softmax":
        scores = exp / exp.sum()
      else:
        scores = 1 / (1 + np.exp(-logits))
      stats["z_B"][b] += (np.log(exp.sum()) + logits.real.max()) ** 2
      shares += scores / scores.sum()
      order = scores.real + (0 if weights["bias"] is None else weights["bias"])
      chosen = np.argsort(-order, kind="stable")[:k]
      total = scores[chosen].sum() if moe.normalize else 1
      for e in chosen:
        stats["counts_BE"][b, e] += 1
        if taken[e] >= capacity:
          stats["dropped_B"][b] += 1
          continue
        taken[e] += 1
        one = {
          name: None if weights[name] is None else weights[name][e]
          for name in ("gate", "up", "down")
        }
        y[b, t] += moe.scale * scores[e] / total * feed(one, x[b, t])
      if weights["shared"] is not None:
        y[b, t] += feed(weights["shared"], x[b, t])
    f = E / (k * max(len(real), 1)) * stats["counts_BE"][b]
    stats["balance_B"][b] = f @ shares
  stats["router_loss_B"] = (
    moe.balance_loss * stats["balance_B"] + moe.z_loss * stats["z_B"]
  )
  return y, stats
