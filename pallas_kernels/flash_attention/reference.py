"""Attention as its definition reads: all scores at once, float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot
from pallas_kernels.flash_attention.dropout import drop
from pallas_kernels.flash_attention.options import (
  LEAST,
  Options,
  Rows,
  visible,
)


def attend(
  options: Options,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  queries: Rows,
  keys: Rows,
  words_2BNT: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Output [B, T, N, H] and logsumexp [B, T, N]; O(T S) memory."""
  B, T, N, H = q_BTNH.shape
  K = k_BSKH.shape[2]
  q = q_BTNH.reshape(B, T, K, N // K, H)
  scores = dot("BTKGH,BSKH->BKGTS", q, k_BSKH, options.operands)
  scores = scores * options.scale
  if options.soft_cap is not None:
    scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
  seen = visible(options, queries, keys)[:, None, None]
  scores = jnp.where(seen, scores, -jnp.inf)
  # A row that sees nothing gives 0, not NaN.
  top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LEAST)
  top = jax.lax.stop_gradient(top)
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  total = jnp.where(total == 0.0, 1.0, total)
  lse = (top + jnp.log(total))[..., 0]
  weights = weights / total
  if words_2BNT is not None:
    columns = tuple(words_2BNT.reshape(2, B, K, N // K, T, 1))
    index = keys.index[:, None, None, None]
    weights = drop(weights, columns, index, options.dropout_rate)
  out = dot("BKGTS,BSKH->BTKGH", weights, v_BSKH, options.operands)
  out = out.reshape(B, T, N, H).astype(options.out_dtype)
  return out, jnp.transpose(lse, (0, 3, 1, 2)).reshape(B, T, N)
