"""Projection to a vocabulary and its cross-entropy, never all logits at once.

[B, T, V] logits would be the largest array of a training step by far. All
implementations but the reference compute them for some tokens at a time, the
backward pass included.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import impls
from pallas_kernels.linear_cross_entropy import reference, tpu, xla
from pallas_kernels.linear_cross_entropy.options import Options, Shard
from pallas_kernels.linear_cross_entropy.split import total
from pallas_kernels.linear_cross_entropy.tuning import Blocks

_IMPLS = {"reference": reference, "xla": xla, "tpu": tpu, "gpu": xla}
# "shard": the caller's mesh axes are automatic, and Mosaic kernels cannot be
# partitioned. "top_k": the kernel sees a part of the vocabulary at a time and
# has no cheap way to keep the k best of all.
HONOURS = {
  "reference": frozenset({"shard", "top_k"}),
  "xla": frozenset({"shard", "top_k"}),
  "tpu": frozenset(),
  "gpu": frozenset({"shard", "top_k"}),
}


class LogProbs(NamedTuple):
  """Log-probabilities in nats, float32.

  Attributes:
    targets: [B, T], those of the targets.
    top: [B, T, K], the K largest in falling order, without gradient; None
      where none were asked for.
    top_ids: int32 [B, T, K], whose they are.
  """

  targets: jax.Array
  top: jax.Array | None
  top_ids: jax.Array | None


def linear_cross_entropy(
  x_BTD: jax.Array,
  head: jax.Array,
  targets_BT: jax.Array,
  weights_BT: jax.Array,
  *,
  layout: str,
  z_loss: float = 0.0,
  soft_cap: float | None = None,
  scale: float = 1.0,
  operands: str = "float32",
  chunk: int = 1024,
  shard: Shard | None = None,
  num_batch_shards: int = 1,
  vocab_axis: str | tuple[str, ...] | None = None,
  blocks: Blocks | None = None,
  impl: str = "auto",
  platform: str | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The weighted sum over tokens of the cross-entropy of x times the head.

  Logits, softmax and sums are float32. All implementations but the reference
  compute the gradients beside the loss, with three matmuls in all, since a
  sum needs no more than a scalar from the backward pass.

  A token of weight 0 adds nothing, to the gradient neither: its target may
  be anything, and its x too, NaN included. A target outside of [0, V) under
  any other weight gives NaN.

  Args:
    x_BTD: hidden states.
    head: the projection; it is read as it lies.
    targets_BT: int32, ids of tokens.
    weights_BT: float32. They have a gradient: the loss of each token.
    layout: "VD" or "DV", the dims of `head`.
    z_loss: factor of logsumexp ** 2, which keeps logits near a partition
      function of 1 (PaLM, arXiv:2204.02311, section 5).
    soft_cap: logits become soft_cap * tanh(logits / soft_cap), after `scale`.
    scale: multiplies logits.
    operands: dtype of matmul operands, in both directions.
    chunk: tokens a device whose logits exist at a time.
    shard: (activation, logical names of its dims) -> the same, placed. For
      a mesh with automatic axes; "batch", "seq" and "vocab" are used.
    num_batch_shards: how many ways such a mesh splits B.
    vocab_axis: inside a `shard_map` (check_vma=False) over these axes: `head`
      has this device's part of the vocabulary, in order. x, targets, weights
      and the results are the same on all devices of the axis.
    blocks: of the TPU kernels; None: those of the tuning table.
    impl: "reference", "xla", "tpu", "gpu" (the same as "xla"), or "auto".
    platform: of the devices that will run it, for "auto"; None: JAX's own.

  Returns:
    The sum, and its parts without gradients, {"nll", "z_loss"}: float32
    scalars, in nats. Gradients have the dtypes of x and head; those of the
    head are summed in float32.

  Raises:
    ValueError: shapes or dtypes disagree, or see `impls.choose`.
  """
  _check(x_BTD, head, targets_BT, layout, chunk)
  if weights_BT.shape != targets_BT.shape:
    raise ValueError(
      f"wanted weights {targets_BT.shape} like targets, got {weights_BT.shape}"
    )
  options = Options(
    layout=layout,
    scale=scale,
    soft_cap=soft_cap,
    z_loss=z_loss,
    top_k=0,
    operands=operands,
    chunk=chunk,
    num_batch_shards=num_batch_shards,
    shard=shard,
    vocab_axis=vocab_axis,
    blocks=blocks,
  )
  chosen = _choose(options, impl, platform)
  is_token, targets_BT = _in_vocabulary(options, head, targets_BT)
  fine = is_token | (weights_BT == 0.0)
  weights_BT = jnp.where(fine, weights_BT, jnp.nan)
  shares = _IMPLS[chosen].cross_entropy(
    options, x_BTD, head, targets_BT, weights_BT
  )
  nll, z = (total(share, vocab_axis) for share in shares)
  # Only the sum has a gradient; a derivative of the parts is a plain 0.
  return nll + z, jax.lax.stop_gradient({"nll": nll, "z_loss": z})


def linear_log_probs(
  x_BTD: jax.Array,
  head: jax.Array,
  targets_BT: jax.Array,
  mask_BT: jax.Array | None = None,
  *,
  layout: str,
  soft_cap: float | None = None,
  scale: float = 1.0,
  top_k: int = 0,
  operands: str = "float32",
  chunk: int = 1024,
  shard: Shard | None = None,
  num_batch_shards: int = 1,
  vocab_axis: str | tuple[str, ...] | None = None,
  blocks: Blocks | None = None,
  impl: str = "auto",
  platform: str | None = None,
) -> LogProbs:
  """The log-probability of each target, for losses that are no plain sum.

  The backward pass recomputes the logits: four matmuls in all.

  Args:
    x_BTD: hidden states.
    head: the projection; it is read as it lies.
    targets_BT: int32, ids of tokens; one outside of [0, V) gives NaN.
    mask_BT: bool; where False, targets and x may be anything, NaN included,
      results are 0 and so are gradients. None: all count.
    layout: "VD" or "DV", the dims of `head`.
    soft_cap: as in `linear_cross_entropy`, as are all that follow.
    scale: multiplies logits.
    top_k: K, how many of the largest log-probabilities are wanted as well.
    operands: dtype of matmul operands, in both directions.
    chunk: tokens a device whose logits exist at a time.
    shard: places activations on a mesh with automatic axes.
    num_batch_shards: how many ways such a mesh splits B.
    vocab_axis: mesh axes that split the vocabulary, inside a `shard_map`.
    blocks: of the TPU kernels; None: those of the tuning table.
    impl: "reference", "xla", "tpu", "gpu" (the same as "xla"), or "auto".
    platform: of the devices that will run it, for "auto"; None: JAX's own.

  Raises:
    ValueError: shapes or dtypes disagree, or see `impls.choose`.
  """
  _check(x_BTD, head, targets_BT, layout, chunk)
  if mask_BT is not None and mask_BT.shape != targets_BT.shape:
    raise ValueError(
      f"wanted mask {targets_BT.shape} like targets, got {mask_BT.shape}"
    )
  options = Options(
    layout=layout,
    scale=scale,
    soft_cap=soft_cap,
    z_loss=0.0,
    top_k=top_k,
    operands=operands,
    chunk=chunk,
    num_batch_shards=num_batch_shards,
    shard=shard,
    vocab_axis=vocab_axis,
    blocks=blocks,
  )
  chosen = _choose(options, impl, platform)
  vocab_size = _vocab_size(options, head)
  if not 0 <= top_k <= vocab_size:
    raise ValueError(f"top_k must be in 0..{vocab_size} = V, got {top_k}")
  is_token, targets_BT = _in_vocabulary(options, head, targets_BT)
  counts = jnp.ones(targets_BT.shape, bool) if mask_BT is None else mask_BT
  share, top = _IMPLS[chosen].log_probs(
    options, x_BTD, head, targets_BT, counts
  )
  values = jnp.where(is_token, total(share, vocab_axis), jnp.nan)
  top, top_ids = jax.lax.stop_gradient(top) if top_k else (None, None)
  if mask_BT is not None:
    values = jnp.where(mask_BT, values, 0.0)
    if top_k:
      top = jnp.where(mask_BT[..., None], top, 0.0)
      top_ids = jnp.where(mask_BT[..., None], top_ids, 0)
  return LogProbs(values, top, top_ids)


def _check(x, head, targets, layout, chunk):
  if layout not in ("VD", "DV"):
    raise ValueError(f"layout must be 'VD' or 'DV', got {layout!r}")
  if x.ndim != 3:
    raise ValueError(f"wanted x [B, T, D], got {x.shape}")
  B, T, D = x.shape
  if head.ndim != 2 or head.shape[layout.index("D")] != D:
    wanted = layout.replace("D", str(D))
    raise ValueError(
      f"wanted head {', '.join(layout)} with D = {D} ({wanted}) to fit x"
      f" {x.shape}, got {head.shape}; layout is {layout!r}"
    )
  if targets.shape != (B, T) or not jnp.issubdtype(targets.dtype, jnp.integer):
    raise ValueError(
      f"wanted integer targets [{B}, {T}] to fit x, got {targets.dtype}"
      f" {targets.shape}"
    )
  if chunk < 1:
    raise ValueError(f"chunk must be at least 1, got {chunk}")


def _choose(options: Options, impl: str, platform: str | None) -> str:
  asked = {"top_k": options.top_k, "shard": options.shard}
  uses = frozenset(name for name, value in asked.items() if value)
  request = impls.Request("linear_cross_entropy", impl, uses)
  return impls.choose(request, HONOURS, platform)


def _vocab_size(options: Options, head: jax.Array) -> int:
  """Of all devices."""
  size = head.shape[options.vocab_dim]
  if options.vocab_axis is not None:
    size *= jax.lax.axis_size(options.vocab_axis)
  return size


def _in_vocabulary(options: Options, head, targets):
  """Which targets are tokens, and the targets with 0 for those that are not."""
  is_token = (targets >= 0) & (targets < _vocab_size(options, head))
  return is_token, jnp.where(is_token, targets, 0).astype(jnp.int32)
