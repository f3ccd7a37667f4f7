"""Attention as its definition reads: all scores at once, float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot
from pallas_kernels.flash_attention.options import (
  Options,
  Rows,
  keep_mask,
  visible,
)


def attend(
  options: Options,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  queries: Rows,
  keys: Rows,
  dropout_keys_B: jax.Array | None,
) -> jax.Array:
  """Output [B, T, N, H], float32; O(T S) memory."""
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
  top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), -1e30)
  weights = jnp.exp(scores - jax.lax.stop_gradient(top))
  total = jnp.sum(weights, axis=-1, keepdims=True)
  weights = weights / jnp.where(total == 0.0, 1.0, total)
  if dropout_keys_B is not None and options.dropout_rate > 0.0:
    shape = (K, N // K, k_BSKH.shape[1])
    keep = keep_mask(options, dropout_keys_B, jnp.arange(T), shape)
    keep = jnp.transpose(keep, (0, 2, 3, 1, 4))
    weights = jnp.where(keep, weights / (1.0 - options.dropout_rate), 0.0)
  out = dot("BKGTS,BSKH->BTKGH", weights, v_BSKH, options.operands)
  return out.reshape(B, T, N, H)
