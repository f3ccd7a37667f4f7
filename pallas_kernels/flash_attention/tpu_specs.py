"""Which blocks of arrays a grid step of the kernels reads."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.flash_attention.tpu_plan import Plan, Side


class Place(NamedTuple):
  """What a grid step works on: numbers of rows, heads and blocks."""

  batch: jax.Array
  head: jax.Array
  kv_head: jax.Array
  block: jax.Array
  chunk: jax.Array


class Specs(NamedTuple):
  """Blocks of arrays.

  Attributes:
    queries: of [B, N, T, H].
    keys: of [B, K, S, H].
    rows: of [B, N, 1, T].
    query_side: of a `Side` of queries.
    key_side: of a `Side` of keys.
  """

  queries: pl.BlockSpec
  keys: pl.BlockSpec
  rows: pl.BlockSpec
  query_side: Side
  key_side: Side


def specs(
  plan: Plan, head_dim: int, place: Callable, queries: Side, keys: Side
) -> Specs:
  """Blocks for a grid whose indices `place` translates into a `Place`."""
  bq, chunk = plan.block_q, plan.chunk_k

  def of(shape, index):
    return pl.BlockSpec(shape, lambda *grid: index(place(*grid)))

  def row_of(array, p: Place):
    return p.batch if array.shape[0] > 1 else 0

  def query_side(array):
    if array.ndim == 4:  # words of dropout
      return of((1, 1, 2, bq), lambda p: (p.batch, p.head, 0, p.block))
    return of((1, 1, bq), lambda p: (row_of(array, p), 0, p.block))

  def key_side(array):
    return of((1, 1, chunk), lambda p: (row_of(array, p), 0, p.chunk))

  return Specs(
    of((1, 1, bq, head_dim), lambda p: (p.batch, p.head, p.block, 0)),
    of((1, 1, chunk, head_dim), lambda p: (p.batch, p.kv_head, p.chunk, 0)),
    of((1, 1, 1, bq), lambda p: (p.batch, p.head, 0, p.block)),
    jax.tree.map(query_side, queries),
    jax.tree.map(key_side, keys),
  )


def last_chunk(plan: Plan, block, chunk):
  """The chunk, or the last one that a block of queries can see.

  What is not seen is not read: a block that stays is not copied again.
  """
  right = plan.options.right
  if plan.offset is None or right is None:
    return chunk
  reach = (block + 1) * plan.block_q - 1 + plan.offset + right
  return jnp.minimum(chunk, jax.lax.div(jnp.maximum(reach, 0), plan.chunk_k))


def first_block(plan: Plan, block, chunk, num_blocks: int):
  """The block of queries, or the first one that can see a chunk."""
  right = plan.options.right
  if plan.offset is None or right is None:
    return block
  position = jnp.maximum(chunk * plan.chunk_k - right - plan.offset, 0)
  first = jax.lax.div(position, plan.block_q)
  return jnp.maximum(block, jnp.minimum(first, num_blocks - 1))


def cost(
  plan: Plan, q_BNTH: jax.Array, matmuls: int, num_bytes: int
) -> pl.CostEstimate:
  """For XLA's scheduler and for accounting: the compiler sees no kernel.

  Args:
    plan: of the work; masks that are arrays are taken to hide nothing.
    q_BNTH: queries.
    matmuls: of H multiplications a score.
    num_bytes: read and written.
  """
  B, N, T, H = q_BNTH.shape
  pairs = T * plan.num_keys
  if plan.offset is not None:
    at = np.arange(T, dtype=np.int64) + plan.offset
    left, right = plan.options.left, plan.options.right
    last = plan.num_keys - 1
    stop = np.full(T, last) if right is None else np.minimum(at + right, last)
    start = np.zeros(T) if left is None else np.maximum(at - left, 0)
    pairs = int(np.maximum(stop - start + 1, 0).sum())
  return pl.CostEstimate(
    flops=2 * matmuls * H * B * N * pairs,
    transcendentals=B * N * pairs,
    bytes_accessed=num_bytes,
  )
