"""Rotary embedding as a Pallas kernel for TPU: read once, written once.

Heads come first inside, as matmuls before and attention after want them; XLA
then writes and reads that layout, and copies nothing.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.call import pallas_call

# Numbers of a block of x, lanes that are left empty included. The kernel waits
# for memory whatever the block; this is large enough for its copies to overlap,
# and small enough for every chip, in float32 too.
_BLOCK = 1 << 18
_LANES = 128


def rotate(x_BTNH: jax.Array, cos_BTP: jax.Array, sin_BTP: jax.Array):
  """Rotates the pairs of dims (i, i + P); see `op.rotary`."""
  B, T, N, H = x_BTNH.shape
  # x cos + (x, its halves swapped) sin, over whole vectors.
  cos_BTH = jnp.concatenate([cos_BTP, cos_BTP], axis=-1)
  sin_BTH = jnp.concatenate([-sin_BTP, sin_BTP], axis=-1)
  rows = min(512, T)
  most = max(1, _BLOCK // (rows * max(H, _LANES)))
  heads = max(n for n in range(1, N + 1) if N % n == 0 and n <= most)

  def kernel(x_ref, cos_ref, sin_ref, out_ref):
    x = x_ref[...].astype(jnp.float32)
    swapped = jnp.concatenate([x[..., H // 2 :], x[..., : H // 2]], axis=-1)
    cos, sin = cos_ref[...][:, None], sin_ref[...][:, None]
    out_ref[...] = (x * cos + swapped * sin).astype(out_ref.dtype)

  shared = cos_BTP.shape[0] == 1
  block = pl.BlockSpec((1, heads, rows, H), lambda b, t, n: (b, n, t, 0))
  angles = pl.BlockSpec(
    (1, rows, H), lambda b, t, n: (0 if shared else b, t, 0)
  )
  out_BNTH = pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct((B, N, T, H), x_BTNH.dtype),
    grid=(B, pl.cdiv(T, rows), N // heads),
    in_specs=[block, angles, angles],
    out_specs=block,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "parallel")
    ),
    cost_estimate=pl.CostEstimate(
      flops=3 * x_BTNH.size,
      bytes_accessed=2 * x_BTNH.nbytes + 2 * cos_BTH.nbytes,
      transcendentals=0,
    ),
    name="rotary",
  )(jnp.swapaxes(x_BTNH, 1, 2), cos_BTH, sin_BTH)
  return jnp.swapaxes(out_BNTH, 1, 2)
