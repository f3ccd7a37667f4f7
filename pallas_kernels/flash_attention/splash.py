"""JAX's splash attention, for the report to compare with."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel,
  splash_attention_mask,
)

from pallas_kernels.flash_attention import report_shape
from pallas_kernels.report_case import Case, Part

SHAPE = report_shape.SHAPE
SIZES = ("block_q", "block_kv", "block_kv_compute")
BACKWARD_SIZES = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
# The best of a search at SHAPE.
BEST = {
  "v5e": (1024, 1024, 256, 1024, 1024, 1024),
  "v6e": (1024, 1024, 512, 1024, 1024, 1024),
}


def make_case(
  chip: str, shape: Mapping[str, int], blocks: Mapping[str, int] | None
) -> Case:
  """Forward and fused backward, bf16."""
  best = dict(zip(SIZES + BACKWARD_SIZES, BEST.get(chip, BEST["v5e"])))
  blocks = dict(blocks or best)
  B, N, K, T, H = (
    shape[name] for name in ("batch", "heads", "kv_heads", "length", "head_dim")
  )
  masks = splash_attention_mask
  mask = masks.CausalMask((T, T)) if shape["causal"] else masks.FullMask((T, T))
  kernel = splash_attention_kernel.make_splash_mha(
    masks.MultiHeadMask([mask] * N),
    block_sizes=splash_attention_kernel.BlockSizes(
      **blocks, use_fused_bwd_kernel=True
    ),
    head_shards=1,
    q_seq_shards=1,
  )

  def loss(q_BNTH, k_BKSH, v_BKSH, *ids_T):
    ids = splash_attention_kernel.SegmentIds(*2 * ids_T) if ids_T else None
    attend = lambda q, k, v: kernel(q, k, v, segment_ids=ids)
    # One row needs no vmap, which would cost the grid a dimension.
    if B == 1:
      out = attend(q_BNTH[0], k_BKSH[0], v_BKSH[0])
    elif ids is None:
      out = jax.vmap(attend)(q_BNTH, k_BKSH, v_BKSH)
    else:
      raise ValueError("segments are reported for batch=1 only")
    return out.astype(jnp.float32).sum()

  array = lambda heads: jax.ShapeDtypeStruct((B, heads, T, H), jnp.bfloat16)
  ids = ()
  if shape["segments"]:
    ids = (jax.ShapeDtypeStruct((T,), jnp.int32),)
  scores = report_shape.unmasked_scores(shape)
  middle = "_segmented" if shape["segments"] else ""
  forward = f"splash_mha_fwd{middle}_residuals"
  backward = f"splash_mha_dkv{middle}_no_residuals"
  scalars = lambda info: [
    np.asarray(array)
    for array in (info.data_next, info.block_mask, info.mask_next)
    if array is not None
  ]
  return Case(
    blocks=blocks,
    function=jax.grad(loss, argnums=(0, 1, 2)),
    args=(array(N), array(K), array(K), *ids),
    parts=(
      Part(
        name="forward",
        kernels=(forward,),
        blocks=SIZES,
        useful_flops=report_shape.FORWARD_FLOPS * H * scores,
        scalars={forward: scalars(kernel.fwd_mask_info)},
      ),
      Part(
        name="backward",
        kernels=(backward,),
        blocks=BACKWARD_SIZES,
        useful_flops=report_shape.BACKWARD_FLOPS * H * scores,
        scalars={backward: scalars(kernel.dkv_mask_info)},
      ),
    ),
  )


def candidates(chip: str, shape: Mapping[str, int]) -> list[dict[str, int]]:
  """The same block sizes in both directions; the search judges each alone."""
  del chip
  T = shape["length"]
  sizes = [size for size in (256, 512, 1024, 2048, 4096) if size <= T]
  return [
    dict(zip(SIZES + BACKWARD_SIZES, 2 * (q, kv, compute)))
    for q in sizes
    for kv in sizes
    for compute in sizes
    # Smaller ones spend their time on steps; larger ones on what the mask
    # hides and on spills, and take minutes to compile.
    if q >= 512 and kv >= 512 and q * kv <= 2**21
    if compute <= kv and q * compute <= 2**20
  ]
