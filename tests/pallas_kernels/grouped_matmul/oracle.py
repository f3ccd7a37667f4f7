"""Grouped matmul group by group in float64."""

import itertools

import numpy as np


def bounds(group_sizes, M: int) -> np.ndarray:
  """Rows of group e are bounds[e] to bounds[e + 1], cut at M."""
  return np.minimum(np.concatenate([[0], np.cumsum(group_sizes)]), M)


def value_and_grads(x, w, group_sizes, dout, *, transpose_w: bool):
  """The product and its gradients, float64.

  Args:
    x: [M, D].
    w: [E, D, F], or [E, F, D] with `transpose_w`.
    group_sizes: [E].
    dout: cotangents, [M, F].
    transpose_w: see `w`.

  Returns:
    out [M, F], dx, dw.
  """
  x, w, dout = (np.asarray(a, np.float64) for a in (x, w, dout))
  out, dx, dw = np.zeros_like(dout), np.zeros_like(x), np.zeros_like(w)
  edges = bounds(group_sizes, len(x))
  for e, (start, stop) in enumerate(itertools.pairwise(edges)):
    weights = w[e].T if transpose_w else w[e]
    out[start:stop] = x[start:stop] @ weights
    dx[start:stop] = dout[start:stop] @ weights.T
    gradient = x[start:stop].T @ dout[start:stop]
    dw[e] = gradient.T if transpose_w else gradient
  return out, dx, dw
