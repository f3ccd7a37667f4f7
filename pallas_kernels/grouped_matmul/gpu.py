"""Grouped matmul as XLA's `ragged-dot`, for which a GPU has kernels."""

import jax
import jax.numpy as jnp


def multiply(
  x_MD: jax.Array,
  w_EDF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  transpose_w: bool,
  dtype,
) -> jax.Array:
  """See `reference.multiply`."""
  numbers = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2 if transpose_w else 1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
  )
  x = _without_tail(x_MD, group_sizes_E)
  return _ragged(x, w_EDF, group_sizes_E, numbers).astype(dtype)


def outer(
  x_MD: jax.Array, y_MF: jax.Array, group_sizes_E: jax.Array, *, dtype
) -> jax.Array:
  """See `reference.outer`."""
  numbers = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  x = _without_tail(x_MD, group_sizes_E)
  y = _without_tail(y_MF, group_sizes_E)
  return _ragged(x, y, group_sizes_E, numbers).astype(dtype)


def _ragged(x, y, group_sizes_E, numbers):
  return jax.lax.ragged_dot_general(
    x,
    y,
    group_sizes_E,
    numbers,
    precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    preferred_element_type=jnp.float32,
  )


def _without_tail(x_MD, group_sizes_E):
  """x with 0 in the rows of no group, which may hold NaN."""
  real = jnp.arange(x_MD.shape[0]) < jnp.sum(group_sizes_E)
  return jnp.where(real[:, None], x_MD, jnp.zeros((), x_MD.dtype))
