"""What the backward pass of a device's layers keeps, from the model itself.

One device's share of the model is traced: heads, feed-forward and vocabulary
by what `tensor` leaves of them, rows and positions by what the batch and
`context` leave. Nothing is compiled and no device is asked. What autodiff
carries from the forward into the backward pass is then there with its shape and
dtype, under any rematerialisation policy and for any family, and is counted.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.extend
import jax.numpy as jnp
from flax import nnx

from model.config import ModelConfig
from model.dropout import row_keys
from model.execution import Execution, Remat
from model.moe import capacity_of
from model.precision import Precision
from model.transformer import Transformer
from sharding.axes import Rules
from sharding.rules import mesh_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
  """What one device holds of a micro-batch and of a layer.

  Attributes:
    config: the model with what the device has of heads and feed-forward.
    rows: of a micro-batch.
    seq_len: positions of a row inside of attention and feed-forward.
    residual_len: positions of a row between them.
    num_experts_apart: devices over which experts are split.
  """

  config: ModelConfig
  rows: int
  seq_len: int
  residual_len: int
  num_experts_apart: int = 1

  @property
  def hidden_values(self) -> int:
    """Of the residual stream of a micro-batch."""
    return self.rows * self.residual_len * self.config.embed_dim


def share(
  config: ModelConfig,
  sizes: Mapping[str, int],
  rules: Rules,
  *,
  seq_len: int,
  rows: int,
) -> Share:
  """Cuts a device's share out of a model and a batch.

  Args:
    config: the model.
    sizes: mesh axis -> devices along it.
    rules: logical dim -> mesh axes.
    seq_len: T.
    rows: of a micro-batch, of all devices.

  Raises:
    ValueError: rows or positions do not divide.
  """
  parts = lambda name: math.prod(sizes[a] for a in mesh_axes(name, rules))
  for name, size in (("batch", rows), ("seq", seq_len)):
    if size % parts(name):
      what = {"batch": "rows of a micro-batch", "seq": "positions of a row"}
      raise ValueError(
        f"{size} {what[name]} do not divide by rules.{name}="
        f"{getattr(rules, name)} of the mesh, {parts(name)} parts"
      )
  local = dataclasses.replace(
    config,
    num_heads=config.num_heads // parts("heads"),
    num_kv_heads=config.num_kv_heads // parts("kv_heads"),
    mlp_dim=config.mlp_dim // parts("mlp"),
    vocab_size=config.vocab_size // parts("vocab"),
  )
  return Share(
    config=local,
    rows=rows // parts("batch"),
    seq_len=seq_len // parts("seq"),
    # Positions that do not divide stay together.
    residual_len=-(-seq_len // parts("residual_seq")),
    num_experts_apart=parts("expert"),
  )


@functools.cache
def kept_bytes(
  share: Share,
  num_layers: int,
  *,
  precision: Precision,
  platform: str,
  remat: Remat = "none",
  remat_every: int = 1,
) -> int:
  """Bytes that some layers keep of a micro-batch for their backward pass.

  Args:
    share: of the device.
    num_layers: that it runs.
    precision: of the run.
    platform: of the device, "tpu", "gpu" or "cpu".
    remat: as in `Execution`.
    remat_every: as in `Execution`.
  """
  config = dataclasses.replace(share.config, num_layers=num_layers)
  execution = _Shared(
    precision=precision,
    remat=remat,
    remat_every=remat_every,
    target=platform,
    lengths={"seq": share.seq_len, "residual_seq": share.residual_len},
  )
  model = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  rows_positions = (share.rows, share.seq_len)
  x = jax.ShapeDtypeStruct(
    (share.rows, share.residual_len, config.embed_dim),
    precision.activations,
  )
  ids = jax.ShapeDtypeStruct(rows_positions, jnp.int32)

  def backward(model, x, positions, segment_ids):
    view = model.view(positions, positions, segment_ids)
    keys = None
    if config.residual_dropout or config.attention_dropout:
      keys = row_keys(jax.random.key(0), jnp.arange(share.rows))

    def layers(layers, x):
      return model.run_layers(
        layers,
        x,
        view,
        dropout_keys=keys,
        execution=execution,
      )[0]

    return jax.vjp(layers, model.layers, x)[1]

  jaxpr = jax.make_jaxpr(backward)(model, x, ids, ids).jaxpr
  shapes = [(v.aval.shape, v.aval.dtype.itemsize) for v in _made(jaxpr)]
  if remat == "dots":
    # What is added to the residual stream is scattered before it is kept.
    whole = (share.seq_len, config.embed_dim)
    part = (share.residual_len, config.embed_dim)
    shapes = [
      ((*shape[:-2], *part) if shape[-2:] == whole else shape, size)
      for shape, size in shapes
    ]
  return sum(_num_values(share, shape) * size for shape, size in shapes)


def _made(jaxpr) -> set:
  """The outputs of a program that are no input of it in another shape."""
  given = {*jaxpr.invars, *jaxpr.constvars}
  is_literal = lambda v: isinstance(v, jax.extend.core.Literal)
  for equation in jaxpr.eqns:
    if equation.primitive.name == "reshape":
      if not is_literal(equation.invars[0]) and equation.invars[0] in given:
        given.update(equation.outvars)
  return {v for v in jaxpr.outvars if not is_literal(v)} - given


def _num_values(share: Share, shape: tuple[int, ...]) -> int:
  """Of an array, with room for the rows that other devices may send."""
  size, moe = math.prod(shape), share.config.moe
  if moe is None or share.num_experts_apart == 1:
    return size
  tokens = share.rows * share.seq_len
  if tokens * moe.num_active not in shape:
    return size
  # `moe._local`: all tokens of all devices may choose this one's experts.
  apart = share.num_experts_apart
  here = moe.num_experts // apart
  most = tokens * min(moe.num_active, here)
  if moe.capacity_factor is not None:
    fits = min(capacity_of(moe, share.seq_len), share.seq_len)
    most = min(most, here * share.rows * fits)
  return size * apart * most // (tokens * moe.num_active)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shared(Execution):
  """Runs a device's share as if others had the rest.

  Attributes:
    target: platform of the device.
    lengths: logical name of a dim of positions -> how many a device has.
  """

  target: str
  lengths: Mapping[str, int]

  @property
  def platform(self) -> str:
    return self.target

  def shard(self, x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """Where positions are gathered or scattered, their number changes."""
    for dim, name in enumerate(names):
      length = self.lengths.get(name, x.shape[dim])
      if length < x.shape[dim]:
        x = jax.lax.slice_in_dim(x, 0, length, axis=dim)
      elif length > x.shape[dim]:
        more = [(0, 0)] * x.ndim
        more[dim] = (0, length - x.shape[dim])
        x = jnp.pad(x, more)
    return x
