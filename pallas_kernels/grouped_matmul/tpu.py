"""Grouped matmul as Pallas kernels for TPU.

Both kernels walk the visits of `visits.py`, whose number only the sizes tell,
as the inner dim of the grid. Whole rows of x and whole columns of the weights
stand in VMEM, so that the weights of a group are read once however many tiles
its rows fill. A tile that several groups share is multiplied in chunks, and a
visit multiplies the chunks that its own group touches.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.call import pallas_call
from pallas_kernels.grouped_matmul import tuning
from pallas_kernels.grouped_matmul.visits import every_group, every_tile


def multiply(
  x_MD: jax.Array,
  w_EDF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  transpose_w: bool,
  dtype,
  tiles: tuning.Tiles | None = None,
) -> jax.Array:
  """See `reference.multiply`.

  Args:
    x_MD: rows, in the dtype of the operands.
    w_EDF: weights, in the dtype of the operands; [E, F, D] with `transpose_w`.
    group_sizes_E: int32.
    transpose_w: see `w_EDF`.
    dtype: of the result.
    tiles: block sizes; None: those of the tuning table.
  """
  M, D = x_MD.shape
  E = w_EDF.shape[0]
  F = w_EDF.shape[1 if transpose_w else 2]
  tiles = tiles or tuning.for_multiply(D, x_MD.dtype.itemsize)
  rows, chunk, cols, depth = tiles.fit(M, D, F)
  visits = every_tile(group_sizes_E, M, rows)
  num_parts = pl.cdiv(D, depth)

  def kernel(bounds, groups, row_tiles, x_ref, w_ref, out_ref, *scratch):
    visit = pl.program_id(1)
    group = groups[visit]
    first = row_tiles[visit] * rows
    low = jnp.maximum(bounds[group] - first, 0)
    high = jnp.minimum(bounds[group + 1] - first, rows)
    whole = high - low == rows

    def part(at, features):
      """x times w over some of the features."""
      w = w_ref[:, features] if transpose_w else w_ref[features, :]
      return _dot(x_ref[at, features], w, 1, 1 if transpose_w else 0)

    def product(at):
      """x times w over all features."""
      if num_parts == 1:
        return part(at, slice(None))
      (sum_ref,) = scratch

      def add(i, _):
        total = jnp.where(i == 0, 0.0, sum_ref[at, :])
        features = pl.ds(pl.multiple_of(i * depth, depth), depth)
        sum_ref[at, :] = total + part(at, features)

      jax.lax.fori_loop(0, num_parts - 1, add, None)
      # The last part is of whatever size remains.
      rest = slice((num_parts - 1) * depth, D)
      return sum_ref[at, :] + part(at, rest)

    def store(at, values):
      """Writes the rows of this group; others may have been written before."""
      mine = _between(at, low, high, values.shape)
      kept = out_ref[at, :].astype(jnp.float32)
      out_ref[at, :] = jnp.where(mine, values, kept).astype(dtype)

    @pl.when(whole & (group < E))
    def _():
      out_ref[...] = product(slice(None)).astype(dtype)

    @pl.when(jnp.logical_not(whole) & (group < E))
    def _():
      _for_chunks(low, high, chunk, lambda i, at: store(at, product(at)))

    @pl.when(group == E)
    def _():
      store(slice(None), jnp.zeros((rows, cols), jnp.float32))

  def x_at(_, visit, bounds, groups, row_tiles):
    # Rows of no group are not read: what was read last stays.
    last = jnp.maximum(bounds[E] - 1, 0) // rows
    return jnp.minimum(row_tiles[visit], last), 0

  def w_at(col, visit, bounds, groups, row_tiles):
    at = (col, 0) if transpose_w else (0, col)
    return jnp.minimum(groups[visit], E - 1), *at

  def out_at(col, visit, bounds, groups, row_tiles):
    return row_tiles[visit], col

  w_block = (cols, D) if transpose_w else (D, cols)
  num_cols = pl.cdiv(F, cols)
  scratch = [pltpu.VMEM((rows, cols), jnp.float32)] if num_parts > 1 else []
  return pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((M, F), dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(num_cols, visits.count),
      in_specs=[
        pl.BlockSpec((rows, D), x_at),
        pl.BlockSpec((None, *w_block), w_at),
      ],
      out_specs=pl.BlockSpec((rows, cols), out_at),
      scratch_shapes=scratch,
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=tuning.vmem_limit(),
    ),
    cost_estimate=_cost(M, D, F, num_cols * x_MD.nbytes + w_EDF.nbytes, dtype),
    name="grouped_matmul",
  )(*visits[:3], x_MD, w_EDF)


def outer(
  x_MD: jax.Array,
  y_MF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  dtype,
  tiles: tuning.Tiles | None = None,
) -> jax.Array:
  """See `reference.outer`.

  Args:
    x_MD: rows, in the dtype of the operands.
    y_MF: rows, in the dtype of the operands.
    group_sizes_E: int32.
    dtype: of the result.
    tiles: block sizes; None: those of the tuning table.
  """
  M, D = x_MD.shape
  F = y_MF.shape[1]
  E = group_sizes_E.shape[0]
  tiles = tiles or tuning.for_outer(x_MD.dtype.itemsize)
  rows, chunk, cols, depth = tiles.fit(M, D, F)
  visits = every_group(group_sizes_E, M, rows)

  def kernel(bounds, groups, row_tiles, x_ref, y_ref, out_ref, *scratch):
    visit = pl.program_id(2)
    group = groups[visit]
    first = row_tiles[visit] * rows
    low = jnp.maximum(bounds[group] - first, 0)
    high = jnp.minimum(bounds[group + 1] - first, rows)
    whole = high - low == rows
    before = groups[jnp.maximum(visit - 1, 0)]
    opens = (visit == 0) | (before != group)
    # In float32 the result itself holds the sum.
    sum_ref = scratch[0] if scratch else out_ref

    def add(x, y, is_first):
      total = jnp.where(is_first, 0.0, sum_ref[...])
      sum_ref[...] = total + _dot(x, y, 0, 0)

    def add_chunk(i, at):
      # Both: 0 NaN = NaN, and rows of no group may hold it.
      x, y = (_only(ref[at, :], at, low, high) for ref in (x_ref, y_ref))
      add(x, y, opens & (i == low // chunk))

    @pl.when(whole)
    def _():
      add(x_ref[...], y_ref[...], opens)

    @pl.when(jnp.logical_not(whole))
    def _():
      _for_chunks(low, high, chunk, add_chunk)

    @pl.when(high <= low)
    def _():
      sum_ref[...] = jnp.zeros_like(sum_ref)

    if scratch:
      end = pl.num_programs(2) - 1
      behind = groups[jnp.minimum(visit + 1, end)]

      @pl.when((visit == end) | (behind != group))
      def _():
        out_ref[...] = sum_ref[...].astype(dtype)

  def x_at(row, col, visit, bounds, groups, row_tiles):
    return row_tiles[visit], row

  def y_at(row, col, visit, bounds, groups, row_tiles):
    return row_tiles[visit], col

  def out_at(row, col, visit, bounds, groups, row_tiles):
    return groups[visit], row, col

  num_rows, num_cols = pl.cdiv(D, depth), pl.cdiv(F, cols)
  read = num_cols * x_MD.nbytes + num_rows * y_MF.nbytes
  exact = jnp.dtype(dtype) == jnp.float32
  return pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((E, D, F), dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(num_rows, num_cols, visits.count),
      in_specs=[
        pl.BlockSpec((rows, depth), x_at),
        pl.BlockSpec((rows, cols), y_at),
      ],
      out_specs=pl.BlockSpec((None, depth, cols), out_at),
      scratch_shapes=[] if exact else [pltpu.VMEM((depth, cols), jnp.float32)],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"),
      vmem_limit_bytes=tuning.vmem_limit(),
    ),
    cost_estimate=_cost(E * D, M // E, F, read, dtype),
    name="grouped_matmul_outer",
  )(*visits[:3], x_MD, y_MF)


def _dot(x, y, x_dim: int, y_dim: int):
  """Sum over one dim of each, in float32."""
  return jax.lax.dot_general(
    x,
    y,
    (((x_dim,), (y_dim,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    preferred_element_type=jnp.float32,
  )


def _between(at, low, high, shape):
  """Mask of the rows `at` that are at least `low` and below `high`."""
  first = 0 if isinstance(at, slice) else at.start
  rows = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  return (rows >= low) & (rows < high)


def _only(x, at, low, high):
  """x with 0 in rows outside, by way of float32: bf16 has no select on v5."""
  mine = _between(at, low, high, x.shape)
  return jnp.where(mine, x.astype(jnp.float32), 0.0).astype(x.dtype)


def _for_chunks(low, high, chunk: int, body):
  """body(i, rows of chunk i) for the chunks that touch rows low to high."""

  def step(i, _):
    body(i, pl.ds(pl.multiple_of(i * chunk, chunk), chunk))

  jax.lax.fori_loop(low // chunk, pl.cdiv(high, chunk), step, None)


def _cost(M: int, D: int, F: int, read: int, dtype) -> pl.CostEstimate:
  """Of a product [M, D] [D, F] that reads so many bytes."""
  return pl.CostEstimate(
    flops=2 * M * D * F,
    bytes_accessed=read + M * F * jnp.dtype(dtype).itemsize,
    transcendentals=0,
  )
