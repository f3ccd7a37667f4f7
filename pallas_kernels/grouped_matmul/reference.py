"""Grouped matmul by masks: E times the work, and nothing to get wrong."""

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot


def multiply(
  x_MD: jax.Array,
  w_EDF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  transpose_w: bool,
  dtype,
) -> jax.Array:
  """x[rows of e] @ w[e] for each group e.

  Args:
    x_MD: rows, in the dtype of the operands.
    w_EDF: weights, in the dtype of the operands; [E, F, D] with `transpose_w`.
    group_sizes_E: int32.
    transpose_w: see `w_EDF`.
    dtype: of the result.

  Returns:
    [M, F]; 0 in rows of no group.
  """
  x_EMD = _by_group(x_MD, group_sizes_E)
  weights = "EFD" if transpose_w else "EDF"
  product = dot(f"EMD,{weights}->MF", x_EMD, w_EDF, x_MD.dtype.name)
  return product.astype(dtype)


def outer(
  x_MD: jax.Array, y_MF: jax.Array, group_sizes_E: jax.Array, *, dtype
) -> jax.Array:
  """x[rows of e].T @ y[rows of e] for each group e.

  Args:
    x_MD: rows, in the dtype of the operands.
    y_MF: rows, in the dtype of the operands.
    group_sizes_E: int32.
    dtype: of the result.

  Returns:
    [E, D, F]; 0 for empty groups.
  """
  x_EMD = _by_group(x_MD, group_sizes_E)
  y_EMF = _by_group(y_MF, group_sizes_E)
  return dot("EMD,EMF->EDF", x_EMD, y_EMF, x_MD.dtype.name).astype(dtype)


def _by_group(x_MD, group_sizes_E):
  """x once a group, [E, M, D], with 0 in the rows of other groups."""
  ends = jnp.cumsum(group_sizes_E)[:, None]
  rows = jnp.arange(x_MD.shape[0])[None]
  member_EM = (rows >= ends - group_sizes_E[:, None]) & (rows < ends)
  # Not a product with 0 or 1: 0 NaN = NaN.
  return jnp.where(member_EM[:, :, None], x_MD[None], jnp.zeros((), x_MD.dtype))
