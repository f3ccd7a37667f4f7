"""The kernels agree with JAX's own splash attention, interpreted."""

import jax
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)

from pallas_kernels.flash_attention.op import flash_attention
from tests.tolerances import tolerance

T, N, H = 256, 2, 128


@pytest.mark.parametrize("window", [None, 100])
def test_agrees_with_splash_attention(window):
  rng = np.random.default_rng(0)
  q, k, v, g = rng.normal(size=(4, T, N, H)).astype("float32")
  ids = np.sort(rng.integers(1, 4, T, dtype=np.int32))
  mask = masks.CausalMask((T, T))
  if window is not None:
    mask = masks.LocalMask((T, T), (window - 1, 0), 0)
  block = dict.fromkeys(
    [
      "block_q",
      "block_kv",
      "block_kv_compute",
      "block_q_dkv",
      "block_kv_dkv",
      "block_kv_dkv_compute",
      "block_q_dq",
      "block_kv_dq",
    ],
    128,
  )
  kernel = splash.make_splash_mha(
    masks.MultiHeadMask([mask] * N),
    block_sizes=splash.BlockSizes(**block),
    head_shards=1,
    q_seq_shards=1,
    interpret=True,
  )
  scale = H**-0.5

  def theirs(q, k, v):
    heads = (x.swapaxes(0, 1) for x in (q * scale, k, v))
    return kernel(*heads, splash.SegmentIds(ids, ids)).swapaxes(0, 1)

  def ours(q, k, v):
    return flash_attention(
      q[None],
      k[None],
      v[None],
      window=window,
      q_segment_ids=ids[None],
      k_segment_ids=ids[None],
      impl="tpu",
    )[0]

  def outputs(attend):
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(g)

  for name, got, want in zip(
    ("out", "dq", "dk", "dv"),
    *(jax.jit(outputs, static_argnums=0)(f) for f in (ours, theirs)),
    strict=True,
  ):
    np.testing.assert_allclose(
      got, want, err_msg=name, **tolerance("attention")
    )
