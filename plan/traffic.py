"""Bytes that a device sends in a training step, by mesh axis and by purpose.

What a step gathers, scatters and permutes follows from the places of its
weights and from how the model pins its activations; the size of each from
`sharding/collectives.py`. Sums that a TPU scatters are float32.
"""

import dataclasses
import math
from collections import defaultdict

import jax.numpy as jnp

from model.config import ModelConfig
from model.execution import Remat
from model.precision import resolve
from plan import activations, held
from sharding import collectives as costs
from train.pipeline import Stages, make_stages
from train.run_config import PretrainConfig

_AGAIN: dict[Remat, int] = {"none": 0, "dots": 0, "block": 1, "nested": 2}


def forward_again(remat: Remat, stages: Stages | None) -> int:
  """How often a step computes the layers forward once more.

  A stage of a pipeline keeps its input, unless its schedule splits backward
  actions, and begins its backward action with a forward pass.
  """
  return _AGAIN[remat] + (stages is not None and not stages.schedule.split)


@dataclasses.dataclass(frozen=True)
class Traffic:
  """What a device sends in a step.

  Attributes:
    sent: (mesh axes, purpose) -> bytes.
  """

  sent: dict[tuple[tuple[str, ...], str], float]

  @property
  def by_axes(self) -> dict[tuple[str, ...], float]:
    """Mesh axes, over which devices talk as one group -> bytes."""
    totals = defaultdict(float)
    for (axes, _), num_bytes in self.sent.items():
      totals[axes] += num_bytes
    return dict(totals)


def traffic(config: PretrainConfig, num_devices: int, platform: str) -> Traffic:
  """Counts a step.

  Args:
    config: the run.
    num_devices: of the machine.
    platform: "tpu", "gpu" or "cpu".

  Raises:
    ValueError: what the training loop would refuse, too; gradients that cross
      between replicas compressed, or not in every step.
  """
  step, data = config.step, config.data
  if step.compression != "none" or step.local.steps is not None:
    raise ValueError(
      "what replicas send is counted where they add up the whole gradients of"
      " every step: wanted step.compression=none and step.local.steps=none, got"
      f" {step.compression!r} and {step.local.steps}"
    )
  here = held.hold(config, num_devices)
  mesh = here.mesh
  share = activations.share(
    config.model,
    mesh.shape,
    config.rules,
    seq_len=data.seq_len,
    rows=data.global_batch_size // step.accumulation,
  )
  precision = resolve(step.precision, platform)
  width = jnp.dtype(precision.activations).itemsize
  sender = _Sender(mesh.shape)
  stages = make_stages(step.schedule, here.layout, mesh, step.accumulation)
  again = forward_again(step.remat, stages)
  operand = jnp.dtype(precision.operands).itemsize
  _weights(sender, here, config, operand, again)
  _activations(sender, here, config, share, width, again)
  if stages is not None:
    sender.add(
      costs.permute_bytes,
      ("pipeline",),
      "between stages",
      width * share.hidden_values,
      2 * len(stages.schedule.table),
    )
  return Traffic(dict(sender.sent))


def products_back(model: ModelConfig) -> int:
  """Products of a layer whose sums are the gradients of its two inputs.

  Of queries, keys and values, and of the feed-forward; each is scattered, or
  reduced, by itself.
  """
  return 3 + (2 if model.gated else 1)


class _Sender:
  """Adds up what a device sends; axes of one device send nothing."""

  def __init__(self, sizes):
    self.sizes = sizes
    self.sent = defaultdict(float)

  def add(self, formula, axes, purpose: str, num_bytes: float, times=1.0):
    """A collective over some axes, of an array of so many bytes in all."""
    axes = tuple(axis for axis in axes if self.sizes[axis] > 1)
    n = math.prod(self.sizes[axis] for axis in axes)
    if n > 1:
      self.sent[axes, purpose] += times * formula(num_bytes, n)

  def parts(self, axes) -> int:
    """Devices along some axes."""
    return math.prod(self.sizes[axis] for axis in axes)


def _weights(
  sender: _Sender,
  here: held.Held,
  config: PretrainConfig,
  operand: int,
  again: int,
):
  """Weights that are gathered, and gradients that are summed.

  An array is whole where it is used. It is split, over axes that also split
  tokens, where it is kept, where micro-batches add up its gradient, and where
  it is updated: what differs travels.
  """
  step, rules = config.step, config.rules
  tokens_split = tuple(dict.fromkeys((*rules.batch, *rules.seq)))
  micro = step.accumulation
  alone = micro == 1 and here.layout is None
  vocab = config.model.vocab_size, config.model.embed_dim
  for weight in here.weights:
    leaf, layers = weight.leaf, weight.layers
    used = [
      {a for e in p.spec for a in ((e,) if isinstance(e, str) else e or ())}
      for p in (
        weight.kept,
        weight.updated if alone else weight.summed,
        weight.updated,
      )
    ]
    # Tokens travel to their experts, and to the table of embeddings.
    stays = {"expert"} if "expert" in used[2] else set()
    axes = [a for a in tokens_split if a not in stays]
    kept, summed, updated = ([a for a in axes if a in u] for u in used)
    size = math.prod(weight.updated.shard_shape(leaf.shape))
    size *= sender.parts(updated)
    looked_up = leaf.shape == vocab and not config.model.tied
    whole = size * leaf.dtype.itemsize
    if not looked_up:
      # One gathering serves a backward pass and the forward one before it.
      passes = 1 + max(1, again) if layers else 1
      sender.add(
        costs.all_gather_bytes, kept, "weights", size * operand, micro * passes
      )
      sender.add(costs.reduce_scatter_bytes, summed, "gradients", whole, micro)
    once = [a for a in updated if a not in summed]
    part = whole / sender.parts(summed)
    sender.add(costs.reduce_scatter_bytes, once, "gradients", part)
    rest = [a for a in axes if a not in updated]
    part = whole / sender.parts(updated)
    sender.add(costs.all_reduce_bytes, rest, "gradients", part)
    if not layers:
      # Every stage holds what stands at the ends, and two have a gradient.
      sender.add(costs.all_reduce_bytes, ("pipeline",), "gradients", part)
    new = [a for a in updated if a not in kept]
    part = whole / sender.parts(kept)
    sender.add(costs.all_gather_bytes, new, "updated weights", part)


def _activations(
  sender: _Sender,
  here: held.Held,
  config: PretrainConfig,
  share: activations.Share,
  width: int,
  again: int,
):
  """What tokens send: to parts of layers, of the sequence, and of the table."""
  model, step, rules = config.model, config.step, config.rules
  layout = here.layout
  num_layers = layout.depth * layout.num_chunks if layout else model.num_layers
  micro = step.accumulation
  runs = micro * num_layers
  values = share.rows * share.seq_len * model.embed_dim

  # Rows of the table, and of its gradient.
  table = [a for a in rules.embed if a in rules.batch]
  sender.add(
    costs.all_to_all_bytes,
    table,
    "embeddings",
    width * share.hidden_values,
    2 * micro,
  )

  # Tensor parallelism: gathered before attention and feed-forward, scattered
  # behind them; on the way back as many gathers, and a sum of each product.
  tensor = [a for a in rules.residual_seq if a not in rules.seq]
  # The last pass over a layer does not need what it puts out.
  sums = 2 + products_back(model) + max(0, 2 * again - 1)
  gathers = 4 + 2 * again
  gather, scatter = costs.all_gather_bytes, costs.reduce_scatter_bytes
  for formula, size, times in (
    (gather, width * values, runs * gathers + 2 * micro),
    (scatter, 4 * values, runs * sums),
    (scatter, width * values, 2 * micro),
  ):
    sender.add(formula, tensor, "activations", size, times)

  # Context parallelism: keys and values pass all devices of an axis.
  context = rules.seq
  n = sender.parts(context)
  config_ = share.config
  tokens = share.rows * share.seq_len
  keys = 2 * tokens * config_.num_kv_heads * config_.head_dim
  if step.context == "ulysses":
    queries = 2 * tokens * config_.num_heads * config_.head_dim
    sender.add(
      costs.all_to_all_bytes,
      context,
      "keys and values",
      width * (keys + queries),
      runs * (2 + again),
    )
  else:
    hops = (1 + again) * (n - 1) + n
    sender.add(
      costs.permute_bytes, context, "keys and values", width * keys, runs * hops
    )
    sender.add(
      costs.permute_bytes, context, "keys and values", 4 * keys, runs * (n - 1)
    )

  if model.moe is not None:
    sender.add(
      costs.all_to_all_bytes,
      rules.expert,
      "tokens to experts",
      width * values * model.moe.num_active,
      runs * 2 * (2 + again),
    )
