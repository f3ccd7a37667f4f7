"""Multi-head, grouped-query and multi-query attention."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from model import weights
from model.config import ModelConfig
from model.dropout import fold
from model.execution import Execution
from model.linear import Linear
from model.norms import Norm
from model.placed_attention import attended, in_kernels, rotated
from pallas_kernels.flash_attention.dropout import row_words


class View(NamedTuple):
  """What is the same for every layer of a forward pass.

  Attributes:
    angles: a (cos, sin) pair for each kind of layer, or () without rotary
      embedding; see `rope.angles`.
    positions: int32 [B, T] of the queries in their segments.
    segment_ids: int32 [B, T] of the queries; None: all of one segment.
    slots: int32 [B, T], where a cache takes their keys and values.
    cached: int32 [B, S], the position in each slot of a cache, -1 empty.
  """

  angles: tuple
  positions: jax.Array
  segment_ids: jax.Array | None
  slots: jax.Array | None = None
  cached: jax.Array | None = None

  @property
  def numbers(self) -> jax.Array:
    """A number for each token that no other of its row has, int32 [B, T]."""
    if self.segment_ids is None:
      return self.positions
    return self.segment_ids * self.positions.shape[1] + self.positions


class Attention(nnx.Module):
  """Projections around `flash_attention`."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    """Declares the weights: q [D, N, H], k and v [D, K, H], out [N, H, D]."""
    D, N, K = config.embed_dim, config.num_heads, config.num_kv_heads
    H = config.head_dim
    self.config = config
    start = weights.fan_in(D)
    queries = dict(embed=D, heads=N, head_dim=H)
    keys = dict(embed=D, kv_heads=K, head_dim=H)
    bias = config.qkv_bias
    self.q = Linear("BTD,DNH->BTNH", start, rngs=rngs, bias=bias, **queries)
    self.k = Linear("BTD,DKH->BTKH", start, rngs=rngs, bias=bias, **keys)
    self.v = Linear("BTD,DKH->BTKH", start, rngs=rngs, bias=bias, **keys)
    if config.qk_norm:
      self.q_norm = Norm(config, rngs=rngs, kind="rms", head_dim=H)
      self.k_norm = Norm(config, rngs=rngs, kind="rms", head_dim=H)
    self.out = Linear(
      "BTNH,NHD->BTD",
      weights.fan_in(N * H, branches=2 * config.num_layers),
      rngs=rngs,
      bias=config.out_bias,
      heads=N,
      head_dim=H,
      embed=D,
    )

  def __call__(
    self,
    x_BTD: jax.Array,
    view: View,
    *,
    kind: int | jax.Array,
    cache,
    dropout_keys_B: jax.Array | None,
    execution: Execution,
  ):
    """Attends over the row itself, or over a cache.

    Args:
      x_BTD: normalised input.
      view: positions and segments.
      kind: index of the layer's kind among the distinct kinds of the model;
        traced where layers of several kinds are scanned.
      cache: None, or a function (k_BTKH, v_BTKH) -> (k_BSKH, v_BSKH, new)
        that stores and returns what this layer has seen.
      dropout_keys_B: a PRNG key a row, or None.
      execution: how to run.

    Returns:
      The output [B, T, D], and the `new` that `cache` gave (None without).
    """
    config, shard = self.config, execution.shard
    q, k, v = self._project(x_BTD, execution)
    q = shard(q, ("batch", "seq", "heads", None))
    k = shard(k, ("batch", "seq", "kv_heads", None))
    v = shard(v, ("batch", "seq", "kv_heads", None))
    if config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    if view.angles:
      cos, sin = _pick(view.angles, kind)
      # With a cache what XLA makes of it is small.
      in_kernel = in_kernels(execution) and cache is None
      rotate = functools.partial(rotated, execution, in_kernel, cos, sin)
      q, k = rotate("heads", q), rotate("kv_heads", k)
    new = None
    if cache is not None:
      k, v, new = cache(k, v)

    rows = _rows(view, split=execution.context_axis is not None)
    if dropout_keys_B is not None and config.attention_dropout:
      # Masks follow from positions: they are the same in any order of tokens.
      rows |= dict(q_positions=view.positions, k_positions=view.positions)
      rows["dropout_words_2BNT"] = row_words(
        fold(dropout_keys_B, 0), view.numbers, config.num_heads
      )
    operands = execution.precision.operands
    settings = dict(
      causal=config.causal,
      scale=config.attention_scale,
      soft_cap=config.attention_softcap,
      dropout_rate=config.attention_dropout,
      operands=operands,
      # The projection that follows takes operands; rounded here, half as much
      # is written. On a CPU rounding is work, not bytes.
      out_dtype=operands if execution.platform == "tpu" else "float32",
      platform=execution.platform,
      impl=execution.attention,
    )

    def attend(window: int | None):
      asked = settings | dict(window=window)
      return lambda q, k, v: attended(execution, asked, q, k, v, rows)

    windows = dict(local=config.window) | {"global": None}
    kinds = tuple(dict.fromkeys(config.layer_kinds))
    branches = [attend(windows[name]) for name in kinds]
    if isinstance(kind, int):
      y = branches[kind](q, k, v)
    else:
      y = jax.lax.switch(kind, branches, q, k, v)
    y = shard(y, ("batch", "seq", "heads", None))
    return self.out(y, execution), new

  def _project(self, x_BTD: jax.Array, execution: Execution):
    """Queries, keys and values."""
    if not hasattr(self, "qkv"):
      return [linear(x_BTD, execution) for linear in (self.q, self.k, self.v)]
    # The form for decoding on a CPU, see `serve.weights`.
    N, K = self.config.num_heads, self.config.num_kv_heads
    ends = [N, N + K, N + 2 * K]
    return jnp.split(self.qkv(x_BTD, execution), ends, axis=2)[:3]


def _pick(choices: tuple, index: int | jax.Array):
  """One of several equal trees of arrays; the index may be traced."""
  if isinstance(index, int):
    return choices[index]
  return jax.tree.map(lambda *x: jnp.stack(x)[index], *choices)


def _rows(view: View, *, split: bool) -> dict[str, jax.Array]:
  """The arguments of `flash_attention` that say who may see whom.

  Args:
    view: positions and segments.
    split: whether devices share the sequence: then places mean nothing, and
      positions must be said.
  """
  positions = view.positions
  if view.cached is not None:
    # An empty slot stands after every query. It holds no NaN, so that the
    # cache need not be copied to blank it.
    keys = jnp.where(view.cached < 0, jnp.iinfo(jnp.int32).max, view.cached)
    return dict(q_positions=positions, k_positions=keys)
  rows = dict(q_positions=positions, k_positions=positions) if split else {}
  if view.segment_ids is not None:
    rows |= dict(q_segment_ids=view.segment_ids, k_segment_ids=view.segment_ids)
  return rows
