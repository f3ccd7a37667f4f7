"""The matmul of the kernels' plain XLA forms."""

import jax
import jax.numpy as jnp


def dot(equation: str, x: jax.Array, y: jax.Array, operands: str) -> jax.Array:
  """Einsum of operands cast to the dtype `operands`, in float32 after that.

  Letters that are summed are taken in the order of `y`, the weights, which
  are then read as they lie. `jnp.einsum` sorts them and would copy
  out_NHD to sum over H, N.

  Args:
    equation: "in,in->out"; every letter occurs in two of the three.
    x: first operand.
    y: second operand.
    operands: name of the dtype that is multiplied.
  """
  inputs, out = equation.split("->")
  x_dims, y_dims = inputs.split(",")
  both = [letter for letter in y_dims if letter in x_dims]
  batch = [letter for letter in both if letter in out]
  summed = [letter for letter in both if letter not in out]
  free = [letter for letter in x_dims + y_dims if letter not in both]
  axes = lambda dims, letters: tuple(map(dims.index, letters))
  product = jax.lax.dot_general(
    x.astype(operands),
    y.astype(operands),
    (
      (axes(x_dims, summed), axes(y_dims, summed)),
      (axes(x_dims, batch), axes(y_dims, batch)),
    ),
    # A TPU would multiply float32 in bf16 passes unless told not to.
    precision=jax.lax.Precision.HIGHEST if operands == "float32" else None,
    preferred_element_type=jnp.float32,
  )
  return jnp.transpose(product, axes(batch + free, out))
