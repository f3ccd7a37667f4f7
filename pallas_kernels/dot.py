"""The matmul of the kernels' plain XLA forms."""

import jax
import jax.numpy as jnp


def dot(equation: str, x: jax.Array, y: jax.Array, operands: str) -> jax.Array:
  """Einsum of operands cast to the dtype `operands`, in float32 after that."""
  # A TPU would multiply float32 in bf16 passes unless told not to.
  exact = jax.lax.Precision.HIGHEST if operands == "float32" else None
  return jnp.einsum(
    equation,
    x.astype(operands),
    y.astype(operands),
    precision=exact,
    preferred_element_type=jnp.float32,
  )
