"""The op in chunks of the sequence, in plain XLA, on any platform.

Float32 logits exist for `chunk` tokens a device at a time, forward and
backward. A sum of losses needs no more than a scalar from the backward pass:
its gradients are computed beside it, chunk by chunk, and logits once. The
log-probabilities, whose cotangents are not known in advance, recompute them.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot
from pallas_kernels.linear_cross_entropy import split
from pallas_kernels.linear_cross_entropy.backward import times_cotangent
from pallas_kernels.linear_cross_entropy.options import Options
from pallas_kernels.linear_cross_entropy.padding import readable


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def cross_entropy(options: Options, x_BTD, head, targets_BT, weights_BT):
  """This device's shares of the weighted sums: nll, z-loss."""
  targets = targets_BT - options.first_id(head)

  def chunk(_, part):
    x, targets, weights = part
    logits, _ = _logits(options, readable(x, weights != 0.0), head)
    return None, _losses(options, logits, targets, _lse(options, logits))

  arrays = x_BTD, targets, weights_BT
  _, (nll_BT, z_BT) = _walk(options, chunk, None, arrays)
  return jnp.sum(weights_BT * nll_BT), jnp.sum(weights_BT * z_BT)


def _cross_entropy_fwd(options, x, head, targets, weights):
  """Also computes the gradients that a cotangent of one would ask for."""
  targets = targets - options.first_id(head)

  def coefficients(logits, targets, weights):
    lse = _lse(options, logits)
    losses = _losses(options, logits, targets, lse)
    to_all = weights * (1.0 + 2.0 * options.z_loss * lse)
    return (lse, to_all, weights), losses

  (dx, dhead), (nll, z) = _gradients(
    options, x, head, targets, weights != 0.0, weights, coefficients
  )
  out = jnp.sum(weights * nll), jnp.sum(weights * z)
  return out, (dx, dhead, nll + z)


cross_entropy.defvjp(_cross_entropy_fwd, times_cotangent)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_probs(options: Options, x_BTD, head, targets_BT, counts_BT):
  """This device's share of the log-probabilities, and the `top_k` of all."""
  return _log_probs_fwd(options, x_BTD, head, targets_BT, counts_BT)[0]


def _log_probs_fwd(options, x, head, targets, counts):
  axis, first = options.vocab_axis, options.first_id(head)
  targets = targets - first

  def chunk(_, part):
    x, targets, counts = part
    logits, _ = _logits(options, readable(x, counts), head)
    lse = _lse(options, logits)
    share = _pick(logits, targets) - split.once(lse, axis)
    if options.top_k == 0:
      return None, (lse, share, None)
    values, ids = jax.lax.top_k(logits, min(options.top_k, logits.shape[-1]))
    values, ids = split.best(values, ids + first, options.top_k, axis)
    return None, (lse, share, (values - lse[..., None], ids))

  _, (lse, share, top) = _walk(options, chunk, None, (x, targets, counts))
  return (share, top), (x, head, targets, counts, lse)


def _log_probs_bwd(options, saved, cotangents):
  g, _ = cotangents
  x, head, targets, counts, lse = saved

  def coefficients(logits, targets, rows):
    g, lse = rows
    return (lse, -g, -g), ()

  (dx, dhead), _ = _gradients(
    options, x, head, targets, counts, (g, lse), coefficients
  )
  return dx, dhead, None, None


log_probs.defvjp(_log_probs_fwd, _log_probs_bwd)


def _gradients(options, x, head, targets, counts, rows, coefficients):
  """Gradients of x and of the head, and what else each chunk gives.

  The gradient of the logits of a token is
  (to_all softmax(logits) - to_target [is the target]) slope.

  Each part of the batch has a gradient of the head of its own, and they are
  added once: a sum kept whole would be reduced over devices every chunk.

  Args:
    options: what is asked.
    x: [B, T, D].
    head: the weights.
    targets: int32 [B, T], this device's.
    counts: bool [B, T], false where x may hold anything.
    rows: tree of arrays [B, T].
    coefficients: (logits [B, C, V], targets, a chunk of `rows`) -> (logsumexp,
      to_all, to_target), each [B, C], and a tree of outputs.
  """
  operands, num_parts = options.operands, options.num_batch_shards
  layout = options.layout

  @jax.vmap
  def outer_product(x, grad):
    return dot(f"BTD,BTV->{layout}", x, grad, operands)

  by_part = lambda x: x.reshape(num_parts, -1, *x.shape[1:])

  def chunk(dhead, part):
    x, targets, counts, rows = part
    x = readable(x, counts)
    logits, slope = _logits(options, x, head)
    per_token, outputs = coefficients(logits, targets, rows)
    lse, to_all, to_target = (y[..., None] for y in per_token)
    grad = jnp.exp(logits - lse) * to_all
    grad = grad - jnp.where(_is_target(logits, targets), to_target, 0.0)
    grad = grad * slope
    dx = dot(f"BTV,{layout}->BTD", grad, head, operands)
    dhead = dhead + outer_product(by_part(x), by_part(grad))
    return dhead, (dx.astype(x.dtype), outputs)

  dhead = jnp.zeros((num_parts, *head.shape), jnp.float32)
  names = tuple({"D": None, "V": "vocab"}[letter] for letter in layout)
  dhead = options.place(dhead, ("batch", *names))
  arrays = x, targets, counts, rows
  dhead, (dx, outputs) = _walk(options, chunk, dhead, arrays)
  return (dx, jnp.sum(dhead, axis=0).astype(head.dtype)), outputs


def _losses(options, logits, targets, lse):
  """This device's shares of the two losses of each token, [B, C]."""
  share = split.once(lse, options.vocab_axis)
  if options.vocab_axis is None:
    picked = _gather(logits, targets)
  else:
    picked = _pick(logits, targets)
  return share - picked, options.z_loss * jnp.square(share)


def _lse(options, logits):
  """The logsumexp over the whole vocabulary, [B, C]."""
  return split.total_lse(jax.nn.logsumexp(logits, axis=-1), options.vocab_axis)


def _logits(options, x, head):
  """Logits [B, C, V], and their derivative by the bare product."""
  logits = dot(options.equation, x, head, options.operands) * options.scale
  slope = jnp.float32(options.scale)
  if options.soft_cap is not None:
    tanh = jnp.tanh(logits / options.soft_cap)
    logits = options.soft_cap * tanh
    slope = slope * (1.0 - jnp.square(tanh))
  return options.place(logits, ("batch", None, "vocab")), slope


def _is_target(logits, targets):
  """Bool [B, C, V]; a comparison splits over the vocabulary, a gather not."""
  vocab = jnp.arange(logits.shape[-1], dtype=targets.dtype)
  return targets[..., None] == vocab[None, None]


def _gather(logits, targets):
  """The logit of each target, [B, C], without a pass over all."""
  index = targets[..., None]
  return jnp.take_along_axis(logits, index, axis=-1, mode="clip")[..., 0]


def _pick(logits, targets):
  """The same, 0 where another device has the target."""
  return jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)


def _walk(options, step, carry, arrays):
  """Runs `step` over chunks of the sequence, [B, T, ...] in and out."""
  B, T = jax.tree.leaves(arrays)[0].shape[:2]
  rows = max(1, B // options.num_batch_shards)
  # At least two chunks, so that the logits never exist as a whole.
  size = min(max(1, options.chunk // rows), max(1, T // 2))
  carry, outputs = jax.lax.scan(step, carry, _split(arrays, size))
  return carry, _join(outputs, T)


def _split(arrays, size: int):
  """Trees of [B, T, ...] -> [chunks, B, size, ...]; zeros fill the last."""

  def split(x):
    B, T = x.shape[:2]
    num = -(-T // size)
    fill = [(0, 0)] * x.ndim
    fill[1] = (0, num * size - T)
    x = jnp.pad(x, fill).reshape(B, num, size, *x.shape[2:])
    return jnp.swapaxes(x, 0, 1)

  return jax.tree.map(split, arrays)


def _join(arrays, T: int):
  """Trees of [chunks, B, size, ...] -> [B, T, ...]."""

  def join(x):
    x = jnp.swapaxes(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]

  return jax.tree.map(join, arrays)
