"""Attention for GPUs: cuDNN's kernel, behind `jax.nn.dot_product_attention`."""

import jax

from pallas_kernels.flash_attention.options import Options


def attend(
  options: Options, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array
) -> jax.Array:
  """Output [B, T, N, H]; `op.HONOURS` says what may be asked."""
  cast = lambda x: x.astype(options.operands)
  window = None
  if options.left is not None:
    window = options.left, 0
  out = jax.nn.dot_product_attention(
    *map(cast, (q_BTNH, k_BSKH, v_BSKH)),
    scale=options.scale,
    is_causal=options.right == 0,
    local_window_size=window,
    implementation="cudnn",
  )
  return out.astype(options.out_dtype)
