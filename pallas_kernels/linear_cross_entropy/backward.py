"""The backward pass of a sum whose gradients were computed beside it."""

from pallas_kernels.linear_cross_entropy.options import Options


def times_cotangent(options: Options, saved, cotangents):
  """Gradients of `cross_entropy` in every implementation.

  Args:
    options: of the call.
    saved: gradients of x and head for a cotangent of one, losses of tokens.
    cotangents: of nll and of the z-loss; both are the same, since only their
      sum is differentiated.

  Returns:
    Gradients by x, head, targets (None) and weights.
  """
  del options
  g, _ = cotangents
  dx, dhead, losses = saved
  # Rounding g alone would scale a whole bfloat16 gradient by up to 0.4 %.
  scale = lambda x: (x * g).astype(x.dtype)
  return scale(dx), scale(dhead), None, losses * g
