"""The backward kernel: all three gradients in one pass over the tiles.

Scores lie transposed, keys by queries: what belongs to a query (logsumexp and
the like) is then a row, and only one of five products transposes its operand.
A block of queries walks over the keys of a chunk, whose gradients stay in fast
memory until the last query of the last head that reads them
(arXiv:2307.08691, algorithm 2, with the loops the other way round).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.call import pallas_call
from pallas_kernels.chips import VMEM, this_chip
from pallas_kernels.flash_attention import tpu_plan
from pallas_kernels.flash_attention.tpu_plan import (
  LOG2_E,
  NN,
  NT,
  TN,
  Part,
  Plan,
  Side,
  to_columns,
)
from pallas_kernels.flash_attention.tpu_specs import (
  Place,
  cost,
  first_block,
  specs,
)


def backward(
  plan: Plan,
  q_BNTH,
  k_BKSH,
  v_BKSH,
  g_BNTH,
  lse_BNT,
  delta_BNT,
  scalars,
  queries: Side,
  keys: Side,
  dtype: str,
):
  """Gradients by queries, keys and values.

  Args:
    plan: how the work is cut.
    q_BNTH: as in `forward`, and so are keys and values.
    k_BKSH: keys.
    v_BKSH: values.
    g_BNTH: cotangent of the output, in the dtype of the operands.
    lse_BNT: logsumexp of the scores, float32.
    delta_BNT: of each query, the product of output and cotangent less the
      cotangent of the logsumexp, float32.
    scalars: as in `forward`.
    queries: likewise.
    keys: likewise.
    dtype: of the gradients.
  """
  B, N, T, H = q_BNTH.shape
  K, S = k_BKSH.shape[1:3]
  G = N // K
  bq, chunk = plan.block_q, plan.chunk_k
  num_chunks = S // chunk

  def read(b, k, g, i, scalars):
    chunk = scalars[0][0]
    block = first_block(plan, i, chunk, T // bq)
    return Place(b, k * G + g, k, block, chunk)

  at = specs(plan, H, read, queries, keys)
  # Of one chunk of keys; others are added to it.
  dq_dtype = dtype if num_chunks == 1 else jnp.float32
  of_queries = pl.BlockSpec(
    (1, 1, bq, H), lambda b, k, g, i, _: (b, k * G + g, i, 0)
  )
  of_keys = pl.BlockSpec((1, 1, chunk, H), lambda b, k, g, i, _: (b, k, 0, 0))
  run = pallas_call(
    functools.partial(_kernel, plan),
    name="flash_attention_bwd",
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(B, K, G, T // bq),
      in_specs=[
        at.queries,
        at.keys,
        at.keys,
        at.queries,
        at.rows,
        at.rows,
        at.query_side,
        at.key_side,
      ],
      out_specs=[of_queries, of_keys, of_keys],
      scratch_shapes=[
        pltpu.VMEM((bq, H), jnp.float32),
        pltpu.VMEM((chunk, H), jnp.float32),
        pltpu.VMEM((chunk, H), jnp.float32),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct(q_BNTH.shape, dq_dtype),
      jax.ShapeDtypeStruct((B, K, chunk, H), dtype),
      jax.ShapeDtypeStruct((B, K, chunk, H), dtype),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=(
        "parallel",
        "parallel",
        "arbitrary",
        "arbitrary",
      ),
      # The default is 16 MiB; a chunk of keys lies there whole.
      vmem_limit_bytes=VMEM[this_chip()] << 20,
    ),
    cost_estimate=cost(
      plan,
      q_BNTH,
      5,
      3 * q_BNTH.nbytes + 2 * k_BKSH.nbytes + 2 * v_BKSH.nbytes,
    ),
  )
  row = lambda x: x[:, :, None]
  arrays = q_BNTH, k_BKSH, v_BKSH, g_BNTH, row(lse_BNT * LOG2_E)
  arrays = *arrays, row(delta_BNT), queries, keys
  of_chunk = lambda number: run((number[None], scalars), *arrays)
  if num_chunks == 1:
    return of_chunk(jnp.int32(0))

  def step(dq, number):
    more, dk, dv = of_chunk(number)
    return dq + more, (dk, dv)

  dq = jnp.zeros(q_BNTH.shape, jnp.float32)
  numbers = jnp.arange(num_chunks, dtype=jnp.int32)
  dq, dkv = jax.lax.scan(step, dq, numbers)
  whole = lambda x: jnp.moveaxis(x, 0, 2).reshape(k_BKSH.shape)
  return dq.astype(dtype), *map(whole, dkv)


def _kernel(
  plan,
  scalars,
  q_ref,
  k_ref,
  v_ref,
  g_ref,
  lse_ref,
  delta_ref,
  queries,
  keys,
  dq_ref,
  dk_ref,
  dv_ref,
  dq_sum,
  dk_sum,
  dv_sum,
):
  """One block of queries of one head against one chunk of keys."""
  chunk, ranges = scalars[0][0], scalars[1]
  batch, head, block = map(pl.program_id, (0, 2, 3))
  operands, scale = plan.options.operands, plan.options.scale
  dot = tpu_plan.product(operands)

  @pl.when(jnp.logical_and(head == 0, block == 0))
  def start():
    dk_sum[...] = jnp.zeros_like(dk_sum)
    dv_sum[...] = jnp.zeros_like(dv_sum)

  dq_sum[...] = jnp.zeros_like(dq_sum)

  def visit(tile):
    """Adds what some queries and some keys give each other."""
    rows, here = tile.rows, tile.keys(plan)
    q, g = q_ref[0, 0, rows], g_ref[0, 0, rows]
    k, v = k_ref[0, 0, here], v_ref[0, 0, here]
    scores, tanh = tpu_plan.capped(plan, dot(k, q, NT))
    q_part = tpu_plan.part_of_row(
      queries, tile.queries, block * plan.block_q, plan.offset
    )
    k_part = functools.partial(_keys_part, plan, keys, chunk)
    if tile.masked:
      few = k_part(tile.keys(plan, tile.masked))
      begin = scores.shape[0] - tile.masked
      last = tpu_plan.hidden(plan, q_part, few, scores[begin:])
      if begin:
        last = jnp.concatenate([scores[:begin], last], axis=0)
      scores = last
    weights = jnp.exp2(scores - lse_ref[0, 0, :, rows])
    drop = lambda x: tpu_plan.dropped(plan, q_part, k_part(here), x)
    dv_sum[here] += dot(drop(weights).astype(operands), g, NN)
    slope = drop(dot(v, g, NT)) - delta_ref[0, 0, :, rows]
    slope = weights * slope
    if tanh is not None:
      slope = slope * (1.0 - tanh * tanh)
    slope = slope.astype(operands)
    dk_sum[here] += dot(slope, q, NN)
    dq_sum[rows] += dot(slope, k, TN)

  tpu_plan.walk(plan, ranges, batch, block, chunk, visit)
  dq_ref[0, 0] = (dq_sum[...] * scale).astype(dq_ref.dtype)

  last_head = head == pl.num_programs(2) - 1
  last_block = block == pl.num_programs(3) - 1

  @pl.when(jnp.logical_and(last_head, last_block))
  def finish():
    dk_ref[0, 0] = (dk_sum[...] * scale).astype(dk_ref.dtype)
    dv_ref[0, 0] = dv_sum[...].astype(dv_ref.dtype)


def _keys_part(plan, keys: Side, chunk, here: pl.Slice) -> Part:
  """Some keys of a chunk, [R, 1]."""
  slot = jax.lax.broadcasted_iota(jnp.int32, (here.size, 1), 0)
  slot = slot + (chunk * plan.chunk_k + here.start)
  column = lambda ref: to_columns(ref[0, :, here])[:, :1]
  index = slot if keys.index is None else column(keys.index)
  ids = None
  if keys.segment_ids is not None:
    ids = column(keys.segment_ids)
  return Part(slot, index, ids)
