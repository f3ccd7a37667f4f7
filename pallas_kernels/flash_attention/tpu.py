"""Attention for TPUs: layouts, padding and gradients around two kernels."""

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention import tiles, tuning
from pallas_kernels.flash_attention.options import Options, Rows
from pallas_kernels.flash_attention.tpu_backward import backward
from pallas_kernels.flash_attention.tpu_forward import forward
from pallas_kernels.flash_attention.tpu_plan import Plan, side

ROWS_AXIS = 2  # of laid vectors


def laid(options: Options, x_BTNH: jax.Array) -> jax.Array:
  """[B, N, T, H]: the vectors of a head lie together."""
  return jnp.swapaxes(x_BTNH.astype(options.operands), 1, 2)


def unlaid(x_BNTH: jax.Array) -> jax.Array:
  """The way back."""
  return jnp.swapaxes(x_BNTH, 1, 2)


def values(
  options: Options,
  offset: int | None,
  q_BNTH: jax.Array,
  k_BKSH: jax.Array,
  v_BKSH: jax.Array,
  queries: Rows,
  keys: Rows,
  words_2BNT: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Output [B, T, N, H] and logsumexp [B, T, N]; see `attend`."""
  plan, T, _ = _plan("forward", options, offset, q_BNTH, k_BKSH, queries)
  out, lse = forward(
    plan,
    _filled(q_BNTH, 2, plan.block_q),
    _filled(k_BKSH, 2, plan.chunk_k),
    _filled(v_BKSH, 2, plan.chunk_k),
    *_known(plan, len(q_BNTH), queries, keys, words_2BNT),
  )
  return jnp.swapaxes(out[:, :, :T], 1, 2), jnp.swapaxes(lse[:, :, :T], 1, 2)


def gradients(
  options: Options,
  offset: int | None,
  q_BNTH: jax.Array,
  k_BKSH: jax.Array,
  v_BKSH: jax.Array,
  g_BNTH: jax.Array,
  lse_BTN: jax.Array,
  delta_BTN: jax.Array,
  queries: Rows,
  keys: Rows,
  words_2BNT: jax.Array | None,
  dtype: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """By queries, keys and values; see `attend`."""
  plan, T, S = _plan("backward", options, offset, q_BNTH, k_BKSH, queries)
  of_queries = lambda x: _filled(x, 2, plan.block_q)
  of_keys = lambda x: _filled(x, 2, plan.chunk_k)
  dq, dk, dv = backward(
    plan,
    of_queries(q_BNTH),
    of_keys(k_BKSH),
    of_keys(v_BKSH),
    of_queries(g_BNTH),
    of_queries(jnp.swapaxes(lse_BTN, 1, 2)),
    of_queries(jnp.swapaxes(delta_BTN, 1, 2)),
    *_known(plan, len(q_BNTH), queries, keys, words_2BNT),
    dtype,
  )
  return dq[:, :, :T], dk[:, :, :S], dv[:, :, :S]


def _plan(direction: str, options, offset, q_BNTH, k_BKSH, queries):
  """A plan, the number of queries, and that of keys."""
  T, H = q_BNTH.shape[2:]
  S = k_BKSH.shape[2]
  plan = Plan(
    options=options,
    offset=offset,
    num_keys=S,
    segmented=queries.segment_ids is not None,
    **tuning.find(direction, T, S, H, q_BNTH.dtype.itemsize),
  )
  return plan, T, S


def _filled(x, axis: int, block: int):
  """The same with zeros added until blocks fill the axis."""
  fill = [(0, 0)] * x.ndim
  fill[axis] = (0, -x.shape[axis] % block)
  return jnp.pad(x, fill) if fill[axis][1] else x


def _known(plan: Plan, batch: int, queries: Rows, keys: Rows, words_2BNT):
  """What kernels take beside vectors: scalars, queries, keys."""
  rows = lambda x, block: jax.tree.map(lambda a: _filled(a, 1, block), x)
  queries, keys = rows(queries, plan.block_q), rows(keys, plan.chunk_k)
  counted = plan.offset is not None
  scalars = (
    tiles.ranges(queries, plan.block_q, batch, counted),
    tiles.ranges(keys, plan.block_k, batch, counted),
  )
  words = None
  if words_2BNT is not None:
    words = jnp.moveaxis(_filled(words_2BNT, 3, plan.block_q), 0, 2)
  return scalars, side(plan, queries, words), side(plan, keys)
