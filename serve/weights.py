"""The form of a model's weights that decodes fastest on a CPU."""

import jax
import jax.numpy as jnp
from flax import nnx

from model.execution import Execution
from model.linear import Linear
from model.transformer import Transformer

_PAGE = 4096  # bytes


def for_decoding(
  model: Transformer, execution: Execution = Execution()
) -> Transformer:
  """A model that computes the same and generates faster on a CPU.

  There decoding is bound by reading weights, which goes at full speed only in
  long rows of long matrices. Layers stand apart, so that none is copied out of
  a stack; queries, keys and values are one product; the projections back to
  the residual stream and to a tied vocabulary are laid out by their longer
  side. Takes as much memory again as the weights; on other platforms, and on a
  mesh, the model is given back as it is.

  Args:
    model: any decoder.
    execution: as it will run.
  """
  if execution.platform != "cpu" or execution.mesh is not None:
    return model
  model = model.unstacked()
  for layer in model.layers:
    attention = layer.attention
    attention.qkv = _joined([attention.q, attention.k, attention.v])
    del attention.q, attention.k, attention.v
    mlp = layer.mlp if model.config.moe is None else layer.moe.shared
    if mlp is not None:
      mlp.down = _relaid(mlp.down)
  if model.config.tied:
    table_DV = model.embed.table[...].T
    model.head = _linear("BTD,DV->BTV", table_DV, None, ("embed", "vocab"))
  return model


def _joined(linears: list[Linear]) -> Linear:
  """One product whose result is those of [D, heads, H] weights in a row.

  A head of zeros follows where a row would fill whole pages: numbers below
  each other would then compete for the same lines of the caches.
  """
  heads = sum(linear.w.shape[1] for linear in linears)
  row = heads * linears[0].w.shape[2] * linears[0].w[...].dtype.itemsize
  spare = 1 if row % _PAGE == 0 else 0

  def join(arrays, axis):
    joined = jnp.concatenate([x[...] for x in arrays], axis)
    fill = [(0, 0)] * joined.ndim
    fill[axis] = (0, spare)
    return jnp.pad(joined, fill)

  biases = [linear.b for linear in linears if linear.b is not None]
  return _linear(
    "BTD,DNH->BTNH",
    join([linear.w for linear in linears], 1),
    join(biases, 0) if biases else None,
    ("embed", "heads", "head_dim"),
  )


def _relaid(linear: Linear) -> Linear:
  """The projection of an MLP back to the stream, its weight transposed."""
  bias = None if linear.b is None else linear.b[...]
  return _linear("BTF,DF->BTD", linear.w[...].T, bias, ("embed", "mlp"))


def _linear(
  equation: str,
  w: jax.Array,
  b: jax.Array | None,
  names: tuple[str, ...],
) -> Linear:
  """A product with a weight, and a bias or None, that are there."""
  linear = Linear(
    equation,
    lambda *_: w,
    rngs=nnx.Rngs(0),
    bias=b is not None,
    **dict(zip(names, w.shape, strict=True)),
  )
  if b is not None:
    linear.b[...] = b
  return linear
