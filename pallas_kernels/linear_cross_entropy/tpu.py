"""The op on a TPU: two kernels a chunk of tokens, logits computed once.

The forward kernel walks over the vocabulary with a chunk's x in fast memory:
logits of a block, their running logsumexp (arXiv:1805.02867), the logit of the
target. Float32 logits of the chunk are kept in HBM; this is the largest array.
The backward kernel reads them, turns a block of them into gradients, and with
these adds to dx, which stays in fast memory, and to the gradient of the head,
which comes from HBM and goes back in place. Three matmuls for a sum of losses;
log-probabilities compute the logits once more in the backward pass: four.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.linear_cross_entropy import split, tpu_kernels
from pallas_kernels.linear_cross_entropy.backward import times_cotangent
from pallas_kernels.linear_cross_entropy.options import Options
from pallas_kernels.linear_cross_entropy.padding import readable

# In the kernels a value a token is a column [C, 1].


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def cross_entropy(options: Options, x_BTD, head, targets_BT, weights_BT):
  """This device's shares of the weighted sums: nll, z-loss."""
  arrays = x_BTD, targets_BT, weights_BT != 0.0
  lse, picked = _statistics(options, arrays, head)
  return _sums(*_losses(options, lse, picked), weights_BT)


def _cross_entropy_fwd(options, x, head, targets, weights):
  """Also computes the gradients that a cotangent of one would ask for."""

  def coefficients(lse, weights):
    return weights * (1.0 + 2.0 * options.z_loss * lse), weights

  (dx, dhead), (lse, picked) = _gradients(
    options, x, head, targets, weights != 0.0, weights, coefficients
  )
  nll, z = _losses(options, lse, picked)
  return _sums(nll, z, weights), (dx, dhead, nll + z)


cross_entropy.defvjp(_cross_entropy_fwd, times_cotangent)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_probs(options: Options, x_BTD, head, targets_BT, counts_BT):
  """This device's share of the log-probabilities, and None."""
  return _log_probs_fwd(options, x_BTD, head, targets_BT, counts_BT)[0]


def _log_probs_fwd(options, x, head, targets, counts):
  lse, picked = _statistics(options, (x, targets, counts), head)
  share = picked - split.once(lse, options.vocab_axis)
  return (share, None), (x, head, targets, counts)


def _log_probs_bwd(options, saved, cotangents):
  g, _ = cotangents
  x, head, targets, counts = saved
  coefficients = lambda lse, g: (-g, -g)
  (dx, dhead), _ = _gradients(
    options, x, head, targets, counts, g, coefficients
  )
  return dx, dhead, None, None


log_probs.defvjp(_log_probs_fwd, _log_probs_bwd)


def _statistics(options: Options, arrays, head):
  """Logsumexp and logit of the target, of x, targets and what counts."""

  def chunk(_, part):
    x, targets, counts = part
    x = readable(x, counts[:, 0]).astype(options.operands)
    kernel = tpu_kernels.forward(options, x, head, keep_logits=False)
    statistics = kernel(x, head, _own(options, head, targets))
    return None, _over_parts(options, *statistics)

  return _walk(options, chunk, None, arrays, head)[1]


def _gradients(options, x, head, targets, counts, per_token, coefficients):
  """Gradients of x and of the head; logsumexps and logits of the targets.

  Args:
    options: what is asked.
    x: [B, T, D].
    head: the weights.
    targets: int32 [B, T].
    counts: bool [B, T], false where x may hold anything.
    per_token: float32 [B, T].
    coefficients: (lse, per_token) of a chunk -> (to_all, to_target): the
      gradient of a token's logits is
      (to_all softmax(logits) - to_target [is the target]) slope.
  """

  def chunk(carry, part):
    dhead, is_first = carry
    x, targets, counts, per_token = part
    dtype, x = x.dtype, readable(x, counts[:, 0]).astype(options.operands)
    targets = _own(options, head, targets)
    forward = tpu_kernels.forward(options, x, head, keep_logits=True)
    *statistics, logits = forward(x, head, targets)
    lse, picked = _over_parts(options, *statistics)
    to_all, to_target = coefficients(lse, per_token)
    backward = tpu_kernels.backward(options, x, head)
    columns = targets, lse, to_all, to_target
    dx, dhead = backward(is_first, x, head, logits, *columns, dhead)
    dx = jnp.sum(dx, axis=0).astype(dtype)
    return (dhead, jnp.zeros_like(is_first)), (dx, lse, picked)

  # Not zeros, which would be written for the first chunk to read.
  dhead = jax.lax.empty(head.shape, jnp.float32)
  arrays = x, targets, counts, per_token
  carry = dhead, jnp.ones((1, 1), jnp.int32)
  (dhead, _), (dx, lse, picked) = _walk(options, chunk, carry, arrays, head)
  return (dx, dhead.astype(head.dtype)), (lse, picked)


def _over_parts(options, lse, picked):
  """Logsumexp over cores and devices, and over cores the target's logit."""
  lse = jax.nn.logsumexp(lse, axis=0)
  return split.total_lse(lse, options.vocab_axis), jnp.sum(picked, axis=0)


def _own(options, head, targets):
  """Targets by their place in this device's head; -1: another has it."""
  own = targets - options.first_id(head)
  here = (own >= 0) & (own < head.shape[options.vocab_dim])
  # A place past the last would be one that fills up a block.
  return jnp.where(here, own, -1)


def _losses(options, lse, picked):
  """This device's shares of the two losses of each token, [B, T]."""
  lse = split.once(lse, options.vocab_axis)
  return lse - picked, options.z_loss * jnp.square(lse)


def _sums(nll_BT, z_BT, weights_BT):
  return jnp.sum(weights_BT * nll_BT), jnp.sum(weights_BT * z_BT)


def _walk(options, step, carry, arrays, head):
  """Runs `step` over chunks of all tokens: x [C, D] and columns [C, 1].

  Tokens that fill the last chunk are 0 in all arrays; as weight, 0 makes them
  count for nothing.

  Args:
    options: what is asked.
    step: (carry, chunk of `arrays`) -> (carry, arrays [C, D] or [C, 1]).
    carry: at the start.
    arrays: x [B, T, D] and arrays [B, T].
    head: the weights.

  Returns:
    The last carry, and the outputs as arrays [B, T, D] and [B, T].
  """
  B, T, _ = arrays[0].shape
  size = tpu_kernels.chunk_size(options, arrays[0], head)
  num = max(1, -(-B * T // size))

  def split_up(x):
    x = x.reshape(B * T, math.prod(x.shape[2:]))
    fill = num * size - B * T
    if fill:
      x = jnp.pad(x, [(0, fill), (0, 0)])
    return x.reshape(num, size, x.shape[-1])

  def join(like, x):
    x = x.reshape(num * size, x.shape[-1])
    return x[: B * T].reshape(like.shape)

  carry, outputs = jax.lax.scan(step, carry, tuple(map(split_up, arrays)))
  # The last two are columns, what may be before them is like x.
  likes = arrays[: len(outputs) - 2] + 2 * arrays[1:2]
  return carry, tuple(map(join, likes, outputs))
