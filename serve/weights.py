"""The form of a model's weights that decodes fastest."""

import itertools
import os

import jax
import jax.numpy as jnp
from flax import nnx

from model.execution import Execution
from model.linear import Linear
from model.transformer import Transformer


class Split(nnx.Module):
  """A `Linear` cut along its first output dim into parts.

  XLA runs a product of one row with a matrix on one CPU core, and products
  that do not wait for each other on several: two parts read the weights at
  twice the speed.
  """

  def __init__(self, linear: Linear, num_parts: int):
    """Copies the weights of `linear` into `num_parts` pieces at most."""
    inputs, out = linear.equation.split("->")
    w_dims = inputs.split(",")[1]
    letter = next(letter for letter in out if letter in w_dims)
    # Counted from the end the dim is the same in `w` and `b`.
    dim = w_dims.index(letter) - len(w_dims)
    size = linear.w.shape[dim]
    num_parts = min(num_parts, size)
    cuts = [size * i // num_parts for i in range(num_parts + 1)]
    piece = lambda start, stop: jax.tree.map(
      lambda x: jax.lax.slice_in_dim(x, start, stop, axis=x.ndim + dim), linear
    )
    self.parts = nnx.List(piece(a, b) for a, b in itertools.pairwise(cuts))
    self.axis = out.index(letter)

  def __call__(self, x: jax.Array, execution: Execution) -> jax.Array:
    """The product, as `Linear` gives it."""
    return jnp.concatenate([p(x, execution) for p in self.parts], self.axis)


def for_decoding(
  model: Transformer, execution: Execution = Execution()
) -> Transformer:
  """A model that computes the same and generates faster on a CPU.

  There decoding is bound by reading weights: layers stand apart, so that none
  is copied out of a stack, and the products that nothing runs beside are
  split over the cores. Takes as much memory again as the weights; on other
  platforms, and on a mesh, the model is given back as it is.

  Args:
    model: any decoder.
    execution: as it will run.
  """
  if execution.platform != "cpu" or execution.mesh is not None:
    return model
  num_cores = os.cpu_count() or 1
  model = model.unstacked()
  if num_cores == 1:
    return model
  for layer in model.layers:
    layer.attention.out = Split(layer.attention.out, num_cores)
    layer.mlp.down = Split(layer.mlp.down, num_cores)
  model.head = Split(_head(model), num_cores)
  return model


def _head(model: Transformer) -> Linear:
  """The projection to the vocabulary, of a tied model a copy."""
  if not model.config.tied:
    return model.head
  V, D = model.embed.table.shape
  table_DV = lambda key, shape, dtype: jnp.asarray(model.embed.table[...].T)
  return Linear("BTD,DV->BTV", table_DV, rngs=nnx.Rngs(0), embed=D, vocab=V)
