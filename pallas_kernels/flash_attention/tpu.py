"""Attention for TPUs: layouts, padding and gradients around two kernels."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention import tiles, tuning
from pallas_kernels.flash_attention.options import Options, Rows
from pallas_kernels.flash_attention.tpu_backward import backward
from pallas_kernels.flash_attention.tpu_forward import forward
from pallas_kernels.flash_attention.tpu_plan import Plan, side


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
  options: Options,
  offset: int | None,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  queries: Rows,
  keys: Rows,
  words_2BNT: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Output [B, T, N, H] in the dtype asked for, and logsumexp [B, T, N].

  Args:
    options: what is asked.
    offset: position of the first query where positions just count up, and
      those of keys do from 0; None: they are arrays.
    q_BTNH: queries.
    k_BSKH: keys.
    v_BSKH: values.
    queries: where each query stands.
    keys: where each key stands.
    words_2BNT: of `dropout.row_words`; None: no dropout.
  """
  arrays = q_BTNH, k_BSKH, v_BSKH, queries, keys, words_2BNT
  return _attend_fwd(options, offset, *arrays)[0]


def _attend_fwd(options, offset, q, k, v, queries, keys, words):
  dtypes = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), (q, k, v))
  B, T, _, H = q.shape
  S = k.shape[1]
  plans = _plans(options, offset, T, S, H, queries)
  heads_first = lambda x: jnp.swapaxes(x.astype(options.operands), 1, 2)
  q, k, v = map(heads_first, (q, k, v))
  inputs = _filled(plans, q, k, v, queries, keys, words)
  out, lse = forward(plans[0], *inputs[:3], *_known(plans[0], B, *inputs[3:]))
  out = jnp.swapaxes(out[:, :, :T], 1, 2)
  lse = lse[:, :, :T]
  saved = q, k, v, queries, keys, words, out, lse, dtypes
  return (out, jnp.swapaxes(lse, 1, 2)), saved


def _attend_bwd(options, offset, saved, cotangents):
  q, k, v, queries, keys, words, out, lse, dtypes = saved
  g, g_lse = cotangents
  B, _, T, H = q.shape
  S = k.shape[2]
  plans = _plans(options, offset, T, S, H, queries)
  delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
  delta = jnp.swapaxes(delta - g_lse, 1, 2)
  g = jnp.swapaxes(g.astype(options.operands), 1, 2)
  inputs = _filled(plans, q, k, v, queries, keys, words)
  fill = [(0, 0), (0, 0), (0, inputs[0].shape[2] - T)]
  lse, delta = jnp.pad(lse, fill), jnp.pad(delta, fill)
  g = jnp.pad(g, [*fill, (0, 0)])
  known = _known(plans[1], B, *inputs[3:])
  dq, dk, dv = backward(plans[1], *inputs[:3], g, lse, delta, *known)
  grads = dq[:, :, :T], dk[:, :, :S], dv[:, :, :S]
  cast = lambda x, like: jnp.swapaxes(x, 1, 2).astype(like.dtype)
  return *map(cast, grads, dtypes), None, None, None


attend.defvjp(_attend_fwd, _attend_bwd)


def _plans(options, offset, T, S, H, queries) -> tuple[Plan, Plan]:
  """Of the forward and of the backward kernel."""
  make = functools.partial(
    Plan,
    options=options,
    offset=offset,
    num_keys=S,
    segmented=queries.segment_ids is not None,
  )
  find = lambda direction: tuning.find(direction, T, S, H)
  return make(**find("forward")), make(**find("backward"))


def _filled(plans, q_BNTH, k_BKSH, v_BKSH, queries: Rows, keys: Rows, words):
  """The same with rows added until blocks fill them."""
  size = lambda have, *blocks: -(-have // max(blocks)) * max(blocks) - have
  more_q = size(q_BNTH.shape[2], *(plan.block_q for plan in plans))
  more_k = size(k_BKSH.shape[2], *(plan.chunk_k for plan in plans))

  def fill(x, axis, more):
    if x is None or not more:
      return x
    return jnp.pad(x, [(0, more if n == axis else 0) for n in range(x.ndim)])

  q_BNTH = fill(q_BNTH, 2, more_q)
  k_BKSH, v_BKSH = fill(k_BKSH, 2, more_k), fill(v_BKSH, 2, more_k)
  rows = lambda x, more: Rows(*(fill(a, 1, more) for a in x))
  words = fill(words, 3, more_q)
  return (
    q_BNTH,
    k_BKSH,
    v_BKSH,
    rows(queries, more_q),
    rows(keys, more_k),
    words,
  )


def _known(plan: Plan, batch: int, queries: Rows, keys: Rows, words):
  """What kernels take beside vectors: scalars, queries, keys."""
  counted = plan.offset is not None
  scalars = (
    tiles.ranges(queries, plan.block_q, batch, counted),
    tiles.ranges(keys, plan.block_k, batch, counted),
  )
  if words is not None:
    words = jnp.moveaxis(words, 0, 2)
  return scalars, side(plan, queries, words), side(plan, keys)
