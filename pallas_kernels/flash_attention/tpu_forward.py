"""The forward kernel: online softmax over tiles of keys (arXiv:2307.08691)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.call import pallas_call
from pallas_kernels.chips import VMEM, this_chip
from pallas_kernels.flash_attention import tpu_plan
from pallas_kernels.flash_attention.options import LEAST
from pallas_kernels.flash_attention.tpu_plan import (
  LANES,
  LOG2_E,
  NN,
  NT,
  Part,
  Plan,
  to_columns,
)
from pallas_kernels.flash_attention.tpu_specs import (
  Place,
  cost,
  last_chunk,
  specs,
)


def forward(plan: Plan, q_BNTH, k_BKSH, v_BKSH, scalars, queries, keys):
  """Output [B, N, T, H] and logsumexp, float32 [B, N, T].

  Args:
    plan: how the work is cut.
    q_BNTH: queries in the dtype of the operands; T a multiple of the block.
    k_BKSH: keys; S a multiple of the chunk.
    v_BKSH: values.
    scalars: `tiles.Ranges` of queries and of keys.
    queries: what else is known of each, a `Side`.
    keys: likewise.
  """
  B, N, T, H = q_BNTH.shape
  K, S = k_BKSH.shape[1:3]
  G = N // K
  bq, chunk = plan.block_q, plan.chunk_k
  grid = (B, N, T // bq, S // chunk)

  def read(b, n, i, c, *_):
    return Place(b, n, n // G, i, last_chunk(plan, i, c))

  at = specs(plan, H, read, queries, keys)
  columns = lambda dtype: pltpu.VMEM((bq, LANES), dtype)
  scratch = [
    columns(jnp.float32),
    columns(jnp.float32),
    pltpu.VMEM((bq, H), jnp.float32),
    jax.tree.map(lambda x: _columns_like(x, bq), queries),
  ]
  run = pallas_call(
    functools.partial(_kernel, plan),
    name="flash_attention_fwd",
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=grid,
      in_specs=[at.queries, at.keys, at.keys, at.query_side, at.key_side],
      out_specs=[at.queries, at.rows],
      scratch_shapes=scratch,
    ),
    out_shape=[
      jax.ShapeDtypeStruct(q_BNTH.shape, plan.options.out_dtype),
      jax.ShapeDtypeStruct((B, N, 1, T), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
      # The default is 16 MiB; a chunk of keys lies there whole.
      vmem_limit_bytes=VMEM[this_chip()] << 20,
    ),
    cost_estimate=cost(
      plan, q_BNTH, 2, 2 * q_BNTH.nbytes + k_BKSH.nbytes + v_BKSH.nbytes
    ),
  )
  out, lse = run(scalars, q_BNTH, k_BKSH, v_BKSH, queries, keys)
  return out, lse[:, :, 0]


def _columns_like(array, size: int):
  """Scratch for a row of numbers of the queries, turned to columns."""
  if array.ndim == 4:
    return pltpu.VMEM((2, size, LANES), array.dtype)
  return pltpu.VMEM((size, LANES), array.dtype)


def _kernel(
  plan, scalars, q_ref, k_ref, v_ref, queries, keys, out_ref, lse_ref, *scratch
):
  """One block of queries against one chunk of keys."""
  top_ref, total_ref, sum_ref, columns = scratch
  batch, block, chunk = pl.program_id(0), pl.program_id(2), pl.program_id(3)
  operands = plan.options.operands
  dot = tpu_plan.product(operands)

  @pl.when(chunk == 0)
  def start():
    top_ref[...] = jnp.full_like(top_ref, LEAST)
    total_ref[...] = jnp.zeros_like(total_ref)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    if queries.index is not None:
      columns.index[...] = to_columns(queries.index[0])
    if queries.segment_ids is not None:
      columns.segment_ids[...] = to_columns(queries.segment_ids[0])
    if queries.words is not None:
      for n in range(2):
        columns.words[n] = to_columns(queries.words[0, 0, n : n + 1])

  def visit(tile):
    """Adds the values of some keys to the sums of some queries."""
    rows, here = tile.rows, tile.keys(plan)
    scores, _ = tpu_plan.capped(
      plan, dot(q_ref[0, 0, rows], k_ref[0, 0, here], NT)
    )
    q_part = _rows_part(plan, columns, block, rows)
    k_part = lambda here: tpu_plan.part_of_row(
      keys, here, chunk * plan.chunk_k, 0
    )
    if tile.masked:
      few = k_part(tile.keys(plan, tile.masked))
      begin = scores.shape[1] - tile.masked
      last = tpu_plan.hidden(plan, q_part, few, scores[:, begin:])
      if begin:
        last = jnp.concatenate([scores[:, :begin], last], axis=1)
      scores = last
    old = top_ref[rows]
    top = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    wide = scores.shape[1] // LANES
    weights = jnp.exp2(scores - jnp.tile(top, (1, wide)))
    shrink = jnp.exp2(old - top)
    # Each lane has a sum of its own until the end.
    by_lane = sum(weights[:, n * LANES : (n + 1) * LANES] for n in range(wide))
    top_ref[rows] = top
    total_ref[rows] = shrink * total_ref[rows] + by_lane
    weights = tpu_plan.dropped(plan, q_part, k_part(here), weights)
    values = dot(weights.astype(operands), v_ref[0, 0, here], NN)
    sum_ref[rows] = _wide(shrink, values.shape[1]) * sum_ref[rows] + values

  tpu_plan.walk(plan, scalars, batch, block, chunk, visit)

  @pl.when(chunk == pl.num_programs(3) - 1)
  def finish():
    total = jnp.sum(total_ref[...], axis=1, keepdims=True)
    blind = total == 0.0
    total = jnp.where(blind, 1.0, total)
    out_ref[0, 0] = (sum_ref[...] / total).astype(out_ref.dtype)
    lse = (top_ref[...] + jnp.log2(total)) * (1.0 / LOG2_E)
    lse_ref[0, 0] = jnp.where(blind, LEAST, lse).T[:1]


def _rows_part(plan, columns, block, rows: slice) -> Part:
  """Some queries of a block, [R, 1]."""
  size = rows.stop - rows.start
  slot = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
  slot = slot + block * plan.block_q + rows.start
  column = lambda ref: ref[rows, :1]
  index = slot + (plan.offset or 0)
  ids = words = None
  if columns.index is not None:
    index = column(columns.index)
  if columns.segment_ids is not None:
    ids = column(columns.segment_ids)
  if columns.words is not None:
    words = columns.words[0, rows, :1], columns.words[1, rows, :1]
  return Part(slot, index, ids, words)


def _wide(x: jax.Array, size: int) -> jax.Array:
  """[R, LANES], the same in all lanes, -> [R, size]."""
  if size <= LANES:
    return x[:, :size]
  if size % LANES == 0:
    return jnp.tile(x, (1, size // LANES))
  return jnp.broadcast_to(x[:, :1], (x.shape[0], size))
