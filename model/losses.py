"""Losses of a head over the vocabulary, without ever holding all its logits.

Both walk over chunks of the sequence, so that float32 logits exist for
`Execution.loss_chunk` tokens a device at a time, forward and backward.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from model.execution import Execution
from model.precision import einsum
from model.transformer import Transformer
from pallas_kernels.dot import dot


class Head(NamedTuple):
  """The static part of a projection to logits."""

  equation: str
  scale: float
  soft_cap: float | None
  chunk: int
  execution: Execution


def cross_entropy(
  model: Transformer,
  hidden_BTD: jax.Array,
  targets_BT: jax.Array,
  weights_BT: jax.Array,
  *,
  z_loss: float = 0.0,
  execution: Execution = Execution(),
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
  """Weighted sums over tokens; who divides them is `train/step.py`.

  The gradients of the projection are computed beside the loss, chunk by
  chunk, since a sum needs no more than a scalar from the backward pass: the
  logits are computed once.

  Args:
    model: gives the head, its scale and its soft-cap.
    hidden_BTD: output of the model.
    targets_BT: int32, the token that follows.
    weights_BT: float32, 0 where there is no target.
    z_loss: factor of logsumexp ** 2, which keeps logits near a partition
      function of 1 (PaLM, arXiv:2204.02311, section 5).
    execution: how to run.

  Returns:
    The sum of weighted losses, the sum of weights, and {"nll", "z_loss"}: the
    two parts of the first, without gradients. Nats, float32 scalars.
  """
  head, w = _head(model, hidden_BTD, execution)
  hidden = execution.shard(hidden_BTD, ("batch", "seq", None))
  loss, parts = _cross_entropy(head, z_loss, hidden, w, targets_BT, weights_BT)
  # Only the first has a gradient; a derivative of the parts is a plain 0.
  return loss, jnp.sum(weights_BT), jax.lax.stop_gradient(parts)


def token_log_probs(
  model: Transformer,
  hidden_BTD: jax.Array,
  targets_BT: jax.Array,
  *,
  execution: Execution = Execution(),
) -> jax.Array:
  """Log-probability of each target, float32 [B, T], nats.

  Logits are recomputed in the backward pass.
  """
  head, w = _head(model, hidden_BTD, execution)
  hidden = execution.shard(hidden_BTD, ("batch", "seq", None))

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def chunk(_, part):
    x, targets = part
    logits, _ = _logits(head, x, w)
    log_probs = _pick(logits, targets) - jax.nn.logsumexp(logits, axis=-1)
    return None, log_probs

  parts = _split((hidden, targets_BT), head.chunk)
  return _join(jax.lax.scan(chunk, None, parts)[1], targets_BT.shape[1])


def batch_log_probs(model: Transformer, batch, execution: Execution):
  """Log-probability of each target times its weight, float32 [B, T], nats.

  Args:
    model: the weights.
    batch: "tokens", "positions", "segment_ids", "targets", "loss_weights".
    execution: how to run.
  """
  hidden_BTD = model(
    batch["tokens"],
    positions=batch["positions"],
    segment_ids=batch["segment_ids"],
    execution=execution,
  )
  log_probs_BT = token_log_probs(
    model, hidden_BTD, batch["targets"], execution=execution
  )
  return log_probs_BT * batch["loss_weights"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(head: Head, z_loss: float, hidden, w, targets, weights):
  """The weighted sum of losses, and its two parts."""

  def chunk(_, part):
    x, targets = part
    logits, _ = _logits(head, x, w)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return None, (lse - _gather(logits, targets), z_loss * jnp.square(lse))

  parts = _split((hidden, targets), head.chunk)
  losses = jax.lax.scan(chunk, None, parts)[1]
  return _sums(*_join(losses, targets.shape[1]), weights)


def _cross_entropy_fwd(head, z_loss, hidden, w, targets, weights):
  """Also computes the gradients that a cotangent of one would ask for.

  Each part of the batch has a gradient of the weights of its own, and they
  are added once: a sum kept whole would be reduced over devices every chunk.
  """
  execution = head.execution
  operands, num_parts = execution.precision.operands, execution.num_batch_shards
  inputs, out = head.equation.split("->")
  x_dims, w_dims = inputs.split(",")

  @jax.vmap
  def outer_product(x, grad):
    return dot(f"{x_dims},{out}->{w_dims}", x, grad, operands)

  by_part = lambda x: x.reshape(num_parts, -1, *x.shape[1:])

  def chunk(dw, part):
    x, targets, weights = part
    logits, slope = _logits(head, x, w)
    lse = jax.nn.logsumexp(logits, axis=-1)
    losses = lse - _gather(logits, targets), z_loss * jnp.square(lse)
    probs = jnp.exp(logits - lse[..., None])
    grad = probs * (1.0 + 2.0 * z_loss * lse)[..., None]
    grad = grad - _is_target(logits, targets)
    grad = grad * slope * weights[..., None]
    dx = dot(f"{out},{w_dims}->{x_dims}", grad, w, operands)
    dw = dw + outer_product(by_part(x), by_part(grad))
    return dw, (dx.astype(x.dtype), *losses)

  parts = _split((hidden, targets, weights), head.chunk)
  dw = jnp.zeros((num_parts, *w.shape), jnp.float32)
  names = tuple({"D": None, "V": "vocab"}[letter] for letter in w_dims)
  dw = execution.shard(dw, ("batch", *names))
  dw, outputs = jax.lax.scan(chunk, dw, parts)
  dx, nll, z = _join(outputs, targets.shape[1])
  dw = jnp.sum(dw, axis=0).astype(w.dtype)
  return _sums(nll, z, weights), (dx, dw, nll + z)


def _cross_entropy_bwd(head, z_loss, saved, cotangents):
  g, _ = cotangents
  dx, dw, losses = saved
  # Rounding g alone would scale a whole bfloat16 gradient by up to 0.4 %.
  return (dx * g).astype(dx.dtype), dw * g, None, losses * g


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def _sums(nll_BT, z_BT, weights_BT):
  """Over tokens: the loss, and its parts."""
  nll, z = jnp.sum(weights_BT * nll_BT), jnp.sum(weights_BT * z_BT)
  return nll + z, {"nll": nll, "z_loss": z}


def _head(model: Transformer, hidden_BTD, execution: Execution):
  """The static part of the head, and its weight."""
  equation, w = model.head_weight
  B, T, _ = hidden_BTD.shape
  rows = max(1, B // execution.num_batch_shards)
  # At least two chunks, so that the logits never exist as a whole.
  chunk = min(max(1, execution.loss_chunk // rows), max(1, T // 2))
  config = model.config
  scale, cap = config.logit_scale, config.logit_softcap
  return Head(equation, scale, cap, chunk, execution), w


def _logits(head: Head, x, w):
  """Logits [B, C, V], and their derivative by the bare product."""
  execution = head.execution
  precision = dataclasses.replace(execution.precision, activations="float32")
  logits = einsum(head.equation, x, w, precision) * head.scale
  slope = jnp.float32(head.scale)
  if head.soft_cap is not None:
    tanh = jnp.tanh(logits / head.soft_cap)
    logits = head.soft_cap * tanh
    slope = slope * (1.0 - jnp.square(tanh))
  return execution.shard(logits, ("batch", None, "vocab")), slope


def _is_target(logits, targets):
  """Bool [B, C, V]; a comparison splits over the vocabulary, a gather not."""
  vocab = jnp.arange(logits.shape[-1], dtype=targets.dtype)
  return targets[..., None] == vocab[None, None]


def _gather(logits, targets):
  """The logit of each target, [B, C], without a pass over all."""
  index = targets[..., None]
  return jnp.take_along_axis(logits, index, axis=-1, mode="clip")[..., 0]


def _pick(logits, targets):
  """The same for a gradient, which a gather would scatter."""
  return jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)


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
