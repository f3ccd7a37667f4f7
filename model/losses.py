"""Losses of a head over the vocabulary, without ever holding all its logits.

The op is `pallas_kernels/linear_cross_entropy`; here it meets a model, a
precision policy and a mesh.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from model.execution import Execution
from model.transformer import Transformer
from pallas_kernels.linear_cross_entropy.op import (
  linear_cross_entropy,
  linear_log_probs,
)
from sharding.regions import by_device, gathered, manual_axes
from sharding.rules import mesh_axes, sharding


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
  op = functools.partial(linear_cross_entropy, z_loss=z_loss)
  arrays = hidden_BTD, targets_BT, weights_BT
  loss, parts = _apply(op, model, execution, arrays, summed=True)
  return loss, jnp.sum(weights_BT), parts


def token_log_probs(
  model: Transformer,
  hidden_BTD: jax.Array,
  targets_BT: jax.Array,
  mask_BT: jax.Array | None = None,
  *,
  execution: Execution = Execution(),
) -> jax.Array:
  """Log-probability of each target, float32 [B, T], nats.

  Logits are recomputed in the backward pass.

  Args:
    model: gives the head, its scale and its soft-cap.
    hidden_BTD: output of the model.
    targets_BT: int32, the token that follows.
    mask_BT: bool; where False, the result is 0. None: True.
    execution: how to run.
  """
  if mask_BT is None:
    mask_BT = jnp.ones(targets_BT.shape, bool)
  op = lambda *arrays, **settings: linear_log_probs(*arrays, **settings).targets
  arrays = hidden_BTD, targets_BT, mask_BT
  return _apply(op, model, execution, arrays, summed=False)


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
  return weighted_log_probs(model, hidden_BTD, batch, execution)


def weighted_log_probs(
  model: Transformer, hidden_BTD: jax.Array, batch, execution: Execution
) -> jax.Array:
  """The same of hidden states that are already there.

  Args:
    model: the weights.
    hidden_BTD: output of the model.
    batch: "targets", "loss_weights".
    execution: how to run.
  """
  weights_BT = batch["loss_weights"]
  log_probs_BT = token_log_probs(
    model, hidden_BTD, batch["targets"], weights_BT != 0, execution=execution
  )
  return log_probs_BT * weights_BT


def _apply(
  op: Callable,
  model: Transformer,
  execution: Execution,
  arrays: tuple[jax.Array, ...],
  *,
  summed: bool,
):
  """Runs an op of the head where and how `execution` says.

  Args:
    op: (x, head, *rest, **settings) -> a tree of sums or of arrays [B, T].
    model: gives the head, its scale and its soft-cap.
    execution: how to run.
    arrays: x [B, T, D], rest [B, T].
    summed: whether the results are sums over tokens.
  """
  equation, head = model.head_weight
  config, mesh = model.config, execution.mesh
  impl = execution.loss
  if impl == "auto":
    impl = "tpu" if execution.platform == "tpu" else "xla"
  op = functools.partial(
    op,
    layout=equation[len("BTD,") :][:2],
    scale=config.logit_scale,
    soft_cap=config.logit_softcap,
    operands=execution.precision.operands,
    chunk=execution.loss_chunk,
    impl=impl,
  )
  x, *rest = arrays
  x = execution.shard(x, ("batch", "seq", None))
  if mesh is None:
    return op(x, head, *rest)
  by_xla = execution.context_axis is None and not manual_axes()
  if impl != "tpu" and by_xla:
    shards = execution.num_batch_shards
    return op(x, head, *rest, shard=execution.shard, num_batch_shards=shards)

  # Mosaic kernels cannot be partitioned, nor can a gather in a stage of a
  # pipeline, and chunks of a split sequence would be gathered: each device
  # runs the op on its own tokens and its own part of the vocabulary. Where
  # tokens are split, the vocabulary is not.
  rules = execution.rules
  tokens = mesh_axes("batch", rules) + mesh_axes("seq", rules)
  vocab = tuple(a for a in mesh_axes("vocab", rules) if a not in tokens)
  shared = tuple(a for a in mesh_axes("embed", rules) if a not in vocab)
  rules = dataclasses.replace(rules, vocab=vocab, embed=shared)
  spec = lambda x, names: sharding("loss", x.shape, names, mesh, rules).spec
  layout = op.keywords["layout"]
  head_names = tuple({"D": "embed", "V": "vocab"}[dim] for dim in layout)
  operands = execution.precision.operands

  def local(x, head, *rest):
    head = gathered(head, shared, layout.index("D"), operands)
    out = op(x, head, *rest, vocab_axis=vocab or None)
    add = lambda x: jax.lax.psum(x, tokens) if tokens else x
    return jax.tree.map(add, out) if summed else out

  per_token = spec(rest[0], ("batch", "seq"))
  mapped = by_device(
    local,
    mesh,
    in_specs=(
      spec(x, ("batch", "seq", None)),
      spec(head, head_names),
      *[per_token] * len(rest),
    ),
    out_specs=PartitionSpec() if summed else per_token,
  )
  return mapped(x, head, *rest)
