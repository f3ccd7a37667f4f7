"""Grouped matmul in plain XLA: chunks of rows in a loop over the groups.

XLA's own `ragged-dot` becomes, on a CPU, a dense product with masks: E times
the work, and E copies of the rows.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot

# Rows of a chunk: enough for a matmul to pay for reading the weights, few
# enough not to be wasted on small groups.
CHUNK = 128


def multiply(
  x_MD: jax.Array,
  w_EDF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  transpose_w: bool,
  dtype,
) -> jax.Array:
  """See `reference.multiply`."""
  equation = "MD,FD->MF" if transpose_w else "MD,DF->MF"
  starts, ends = _bounds(group_sizes_E, x_MD.shape[0])

  def group(e, out):
    w = jax.lax.dynamic_index_in_dim(w_EDF, e, keepdims=False)

    def chunk(i, out):
      at, mine = _chunk(starts[e], ends[e], i, x_MD.shape[0])
      product = dot(equation, _rows(x_MD, at), w, x_MD.dtype.name)
      kept = jnp.where(mine, product.astype(dtype), _rows(out, at))
      return jax.lax.dynamic_update_slice_in_dim(out, kept, at, axis=0)

    return jax.lax.fori_loop(0, _num_chunks(starts[e], ends[e]), chunk, out)

  F = w_EDF.shape[1 if transpose_w else 2]
  zeros = jnp.zeros((x_MD.shape[0], F), dtype)
  return jax.lax.fori_loop(0, w_EDF.shape[0], group, zeros)


def outer(
  x_MD: jax.Array, y_MF: jax.Array, group_sizes_E: jax.Array, *, dtype
) -> jax.Array:
  """See `reference.outer`."""

  def group(_, bounds):
    start, end = bounds

    def chunk(i, total):
      at, mine = _chunk(start, end, i, x_MD.shape[0])
      x = jnp.where(mine, _rows(x_MD, at), jnp.zeros((), x_MD.dtype))
      y = jnp.where(mine, _rows(y_MF, at), jnp.zeros((), y_MF.dtype))
      return total + dot("MD,MF->DF", x, y, x_MD.dtype.name)

    zeros = jnp.zeros((x_MD.shape[1], y_MF.shape[1]), jnp.float32)
    total = jax.lax.fori_loop(0, _num_chunks(start, end), chunk, zeros)
    return None, total.astype(dtype)

  bounds = _bounds(group_sizes_E, x_MD.shape[0])
  return jax.lax.scan(group, None, bounds)[1]


def _bounds(group_sizes_E, M: int):
  """First row of each group, and the row after its last."""
  ends = jnp.minimum(jnp.cumsum(group_sizes_E), M)
  return jnp.minimum(jnp.cumsum(group_sizes_E) - group_sizes_E, M), ends


def _num_chunks(start, end):
  return (end - start + CHUNK - 1) // CHUNK


def _chunk(start, end, i, M: int):
  """Where chunk i of a group is read, and a mask [rows, 1] of what is in it.

  A chunk that would run past the last row starts earlier, on rows that the
  mask hides.
  """
  first = start + i * CHUNK
  at = jnp.clip(first, 0, max(M - CHUNK, 0))
  rows = at + jnp.arange(min(CHUNK, M), dtype=jnp.int32)
  return at, ((rows >= first) & (rows < end))[:, None]


def _rows(x, at):
  size = min(CHUNK, x.shape[0])
  return jax.lax.dynamic_slice_in_dim(x, at, size, axis=0)
