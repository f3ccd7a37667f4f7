"""The op as its definition reads: all logits at once, float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot
from pallas_kernels.linear_cross_entropy import split
from pallas_kernels.linear_cross_entropy.options import Options
from pallas_kernels.linear_cross_entropy.padding import readable


def cross_entropy(options: Options, x_BTD, head, targets_BT, weights_BT):
  """This device's shares of the weighted sums: nll, z-loss."""
  logits, lse = _logits(options, readable(x_BTD, weights_BT != 0.0), head)
  picked = _pick(options, logits, targets_BT)
  lse = split.once(lse, options.vocab_axis)
  nll = jnp.sum(weights_BT * (lse - picked))
  return nll, options.z_loss * jnp.sum(weights_BT * jnp.square(lse))


def log_probs(options: Options, x_BTD, head, targets_BT, counts_BT):
  """This device's share of the log-probabilities, and the `top_k` of all."""
  axis = options.vocab_axis
  logits, lse = _logits(options, readable(x_BTD, counts_BT), head)
  share = _pick(options, logits, targets_BT) - split.once(lse, axis)
  if options.top_k == 0:
    return share, None
  first = split.first_id(logits.shape[-1], axis)
  values, ids = jax.lax.top_k(logits, min(options.top_k, logits.shape[-1]))
  values, ids = split.best(values, ids + first, options.top_k, axis)
  return share, (values - lse[..., None], ids)


def _logits(options, x, head):
  """Logits [B, T, V] of this device, and the logsumexp over all devices."""
  logits = dot(options.equation, x, head, options.operands) * options.scale
  if options.soft_cap is not None:
    logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
  logits = options.place(logits, ("batch", "seq", "vocab"))
  lse = jax.nn.logsumexp(logits, axis=-1)
  if options.vocab_axis is not None:
    # Not `split.total_lse`: the derivative of a maximum over devices is not
    # defined, nor needed.
    top = jax.lax.pmax(jax.lax.stop_gradient(lse), options.vocab_axis)
    lse = top + jnp.log(jax.lax.psum(jnp.exp(lse - top), options.vocab_axis))
  return logits, lse


def _pick(options, logits, targets):
  """The logit of each target, [B, T]; 0 where another device has it."""
  num_own = logits.shape[-1]
  own = targets - split.first_id(num_own, options.vocab_axis)
  vocab = jnp.arange(num_own, dtype=own.dtype)
  is_target = own[..., None] == vocab[None, None]
  return jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
