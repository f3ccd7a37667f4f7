"""The decoder: embeddings, a stack of equal layers, a final norm, a head."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model import rope, weights
from model.attention import View
from model.block import Block
from model.config import ModelConfig
from model.dropout import dropout, fold
from model.embed import Embed
from model.execution import Execution
from model.kv_cache import KVCache, write, write_layer, write_positions
from model.linear import Linear
from model.moe import Stats, summed
from model.norms import Norm
from model.precision import einsum
from model.stack import scan_layers
from sharding.offload import entered


class Transformer(nnx.Module):
  """A decoder-only language model of any family.

  A pytree of float32 weights: plain `jax.jit`, `jax.grad` and `jax.lax.scan`
  take it as it is. It holds no mutable state.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    """Declares and draws the weights.

    Args:
      config: what the model is.
      rngs: its `params` stream draws every weight.
    """
    self.config = config
    self.embed = Embed(config, rngs=rngs)
    keys = jax.random.split(rngs.params(), config.num_layers)
    self.layers = jax.vmap(lambda key: Block(config, rngs=nnx.Rngs(key)))(keys)
    if config.norm_placement != "post":
      self.final_norm = Norm(config, rngs=rngs, embed=config.embed_dim)
    if not config.tied:
      self.head = Linear(
        "BTD,DV->BTV",
        weights.fan_in(config.embed_dim),
        rngs=rngs,
        embed=config.embed_dim,
        vocab=config.vocab_size,
      )

  def __call__(
    self,
    tokens_BT: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    cache: KVCache | None = None,
    dropout_keys: jax.Array | None = None,
    execution: Execution = Execution(),
  ):
    """The residual stream after the final norm.

    Args:
      tokens_BT: int32 [B, T].
      positions: int32 [B, T], of each token in its segment; None: 0 .. T-1.
        A segment's tokens stand side by side, in order.
      segment_ids: int32 [B, T]; tokens see their own segment only, and 0 is
        padding. None: a row is one segment.
      cache: keys and values of tokens before these, which join it.
      dropout_keys: a PRNG key a row (`dropout.row_keys`); None: evaluation.
      execution: how to run.

    Returns:
      Hidden states [B, T, D] in the policy's activation dtype; with a cache,
      a pair of them and the new cache.

    Raises:
      ValueError: a cache for a model that is not causal.
    """
    view = self.view(tokens_BT, positions, segment_ids)
    if cache is None:
      return self._forward(tokens_BT, view, dropout_keys, execution)[0]
    if not self.config.causal:
      raise ValueError(
        "a cache hides its empty slots by causality: wanted"
        " model.causal=True, or no cache"
      )
    slots = cache.slots(view.positions, segment_ids)
    cached = write_positions(cache.positions, slots, view.positions)
    view = view._replace(slots=slots, cached=cached)
    x = self.embedded(tokens_BT, view, dropout_keys, execution)
    x, (k, v), _ = self.run_layers(
      self.layers,
      x,
      view,
      kv=(cache.k, cache.v),
      dropout_keys=dropout_keys,
      execution=execution,
    )
    cache = dataclasses.replace(cache, k=k, v=v, positions=cached)
    return self.normed(x), cache

  def forward(
    self,
    tokens_BT: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    dropout_keys: jax.Array | None = None,
    execution: Execution = Execution(),
  ) -> tuple[jax.Array, Stats]:
    """The same without a cache, and what the layers counted.

    Returns:
      Hidden states [B, T, D], and sums over rows or tokens that any split of
      the batch adds up to; {} for a model that counts nothing.
    """
    view = self.view(tokens_BT, positions, segment_ids)
    return self._forward(tokens_BT, view, dropout_keys, execution)

  def _forward(self, tokens_BT, view: View, dropout_keys, execution):
    """All parts in order."""
    x = self.embedded(tokens_BT, view, dropout_keys, execution)
    x, _, stats = self.run_layers(
      self.layers, x, view, dropout_keys=dropout_keys, execution=execution
    )
    return self.normed(x), stats

  def view(
    self,
    tokens_BT: jax.Array,
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
  ) -> View:
    """What every layer reads beside the residual stream."""
    if positions is None:
      positions = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
      positions = jnp.broadcast_to(positions, tokens_BT.shape)
    return View(self._angles(positions), positions, segment_ids)

  def embedded(
    self,
    tokens_BT: jax.Array,
    view: View,
    dropout_keys: jax.Array | None,
    execution: Execution,
  ) -> jax.Array:
    """The residual stream before the first layer, [B, T, D]."""
    config = self.config
    x = self.embed(tokens_BT, config.embed_scale, execution)
    x = execution.shard(x, ("batch", "residual_seq", None))
    keys = fold(dropout_keys, config.num_layers)
    return dropout(x, config.embed_dropout, keys, view.numbers)

  def normed(self, x_BTD: jax.Array) -> jax.Array:
    """The residual stream after the last layer, as the head reads it."""
    if self.config.norm_placement == "post":
      return x_BTD
    return self.final_norm(x_BTD)

  def logits(
    self, hidden_BTD: jax.Array, execution: Execution = Execution()
  ) -> jax.Array:
    """Scores of the next token, float32 [B, T, V]."""
    config = self.config
    precision = dataclasses.replace(execution.precision, activations="float32")
    execution = dataclasses.replace(execution, precision=precision)
    if hasattr(self, "head"):
      y = self.head(hidden_BTD, execution)
    else:
      table = self.embed.table[...]
      y = einsum("BTD,VD->BTV", hidden_BTD, table, precision)
    y = y * config.logit_scale
    if config.logit_softcap is not None:
      y = config.logit_softcap * jnp.tanh(y / config.logit_softcap)
    return execution.shard(y, ("batch", "seq", "vocab"))

  @property
  def head_weight(self) -> tuple[str, jax.Array]:
    """The einsum that projects to the vocabulary, and its weight."""
    if self.config.tied:
      return "BTD,VD->BTV", self.embed.table[...]
    return self.head.equation, self.head.w[...]

  def _angles(self, positions_BT: jax.Array) -> tuple:
    """Cosines and sines of each distinct kind of layer."""
    config = self.config
    if config.rope is None:
      return ()
    local = config.rope_local or config.rope
    ropes = dict(local=local) | {"global": config.rope}
    kinds = dict.fromkeys(config.layer_kinds)
    return tuple(
      rope.angles(ropes[kind], config.head_dim, positions_BT) for kind in kinds
    )

  def run_layers(
    self,
    layers,
    x_BTD: jax.Array,
    view: View,
    *,
    numbers: jax.Array | None = None,
    some_empty: bool = False,
    kv=None,
    dropout_keys: jax.Array | None,
    execution: Execution,
  ):
    """Runs some layers of the stack, one after another.

    Args:
      layers: `self.layers`, or some of them: a tree of arrays [l, ...].
      x_BTD: the residual stream.
      view: of `view`.
      numbers: int32 [l], which layers of the model they are; None: all.
      some_empty: whether -1 stands in `numbers`, for a place without a layer.
      kv: the cache's keys and values, or None.
      dropout_keys: a PRNG key a row, or None.
      execution: how to run.

    Returns:
      The residual stream, the new `kv`, and what the layers counted.
    """
    config = self.config
    kinds = tuple(dict.fromkeys(config.layer_kinds))
    kind_of = np.array([kinds.index(kind) for kind in config.layer_kinds])
    if isinstance(layers, nnx.List):
      return self._run_list(x_BTD, kv, view, kind_of, dropout_keys, execution)
    if numbers is None:
      numbers = jnp.arange(config.num_layers)

    def step(carry, scanned):
      x, kv = carry
      layer, kind, number = scanned
      if len(kinds) == 1:
        kind = 0
      x, kv, stats = entered(layer)(
        x,
        view,
        kind=kind,
        cache=None if kv is None else _stacked(kv, number, view.slots),
        dropout_keys_B=fold(dropout_keys, number),
        execution=execution,
      )
      return (x, kv), stats

    if some_empty:
      step = _unless_empty(step)
    scanned = layers, jnp.asarray(kind_of)[numbers], numbers
    carry = x_BTD, kv
    (x, kv), stats = scan_layers(step, carry, scanned, len(numbers), execution)
    return x, kv, stats and summed(stats, numbers, config.num_layers)

  def _run_list(self, x, kv, view, kind_of, dropout_keys, execution):
    """The same for layers that stand apart, each with a cache of its own."""
    if execution.remat != "none":
      raise ValueError(
        "layers in a list (Transformer.unstacked) are for decoding: wanted"
        f" execution.remat='none', got {execution.remat!r}"
      )
    news, stats = [], []
    for index, layer in enumerate(self.layers):
      mine = None if kv is None else (kv[0][index], kv[1][index])
      x, new, counted = layer(
        x,
        view,
        kind=int(kind_of[index]),
        cache=None if mine is None else _single(mine, view.slots),
        dropout_keys_B=fold(dropout_keys, index),
        execution=execution,
      )
      news.append(new)
      stats.append(counted)
    stats = jax.tree.map(lambda *x: jnp.stack(x), *stats)
    if kv is not None:
      kv = tuple(zip(*news, strict=True))
    numbers = jnp.arange(self.config.num_layers)
    return x, kv, stats and summed(stats, numbers, self.config.num_layers)

  def unstacked(self) -> Self:
    """The same model with its layers in a list.

    Decoding on a CPU is bound by reading weights; a loop over stacked layers
    would first copy each layer out of the stack.
    """
    graph, state = nnx.split(self)
    model = nnx.merge(graph, state)
    take = lambda i: jax.tree.map(lambda x: x[i], self.layers)
    model.layers = nnx.List(take(i) for i in range(self.config.num_layers))
    return model


def _unless_empty(step):
  """A step of a scan over layers that passes over the number -1."""

  def guarded(carry, scanned):
    shapes = jax.eval_shape(step, carry, scanned)[1]
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    skip = lambda carry, scanned: (carry, nothing)
    return jax.lax.cond(scanned[-1] >= 0, step, skip, carry, scanned)

  return guarded


def _stacked(kv, layer, slots_BT):
  """The cache of one layer of a stack; writes into the whole, in place."""

  def store(k_BTKH, v_BTKH):
    k = write_layer(kv[0], layer, slots_BT, k_BTKH)
    v = write_layer(kv[1], layer, slots_BT, v_BTKH)
    return _seen(k[layer]), _seen(v[layer]), (k, v)

  return store


def _single(kv, slots_BT):
  """The cache of one layer that stands apart."""

  def store(k_BTKH, v_BTKH):
    k, v = write(kv[0], slots_BT, k_BTKH), write(kv[1], slots_BT, v_BTKH)
    return _seen(k), _seen(v), (k, v)

  return store


def _seen(x_BKSH: jax.Array) -> jax.Array:
  """A cache as attention takes it, [B, S, K, H]; compilers move no data."""
  return jnp.swapaxes(x_BKSH, 1, 2)
