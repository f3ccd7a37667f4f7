"""What a call may not ask for."""

import numpy as np
import pytest

from pallas_kernels.flash_attention.op import flash_attention


def vectors():
  """q, k and v: B = 2, T = 11, six heads of two."""
  normal = np.random.default_rng(0).normal
  sizes = ((2, 11, heads, 5) for heads in (6, 2, 2))
  return [normal(size=size).astype("float32") for size in sizes]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(impl="cudnn"), "impl of flash_attention must be 'auto'.*'cudnn'"),
    (
      dict(impl="gpu", operands="bfloat16", soft_cap=2.0, return_lse=True),
      "cannot honour return_lse, soft_cap; set impl .* reference, xla, tpu",
    ),
    (dict(impl="gpu"), "cannot honour operands='float32'"),
    (
      dict(impl="gpu", operands="bfloat16", causal=False, window=3),
      "cannot honour bidirectional window",
    ),
    (dict(window=0), "window must be at least 1, got 0"),
    (dict(window=(-1, 0)), "both sides of window must be at least 0"),
    (dict(sinks_N=np.zeros(5)), r"wanted sinks of shape \[6\], got \(5,\)"),
    (
      dict(dropout_rate=0.1, dropout_words_2BNT=np.zeros((2, 2, 11, 6))),
      r"wanted dropout words of shape \(2, 2, 6, 11\)",
    ),
    (dict(q_positions=np.zeros((2, 11), np.int32)), "k_positions both"),
    (
      dict(
        q_positions=np.zeros((2, 11), np.int32),
        k_positions=np.zeros((2, 11), np.int32),
        q_offset=1,
      ),
      "give q_offset or q_positions, not both",
    ),
    (dict(k_segment_ids=np.ones((2, 11), np.int32)), "k_segment_ids both"),
  ],
  ids=str,
)
def test_refuses(changes, message):
  q, k, v = vectors()
  with pytest.raises(ValueError, match=message):
    flash_attention(q, k, v, **changes)


def test_refuses_shapes():
  q, k, v = vectors()
  with pytest.raises(ValueError, match="Set q_offset, or q_positions and"):
    flash_attention(q[:, :3], k, v)
  with pytest.raises(ValueError, match="wanted k and v of shape"):
    flash_attention(q, k, v[:, :3])
  with pytest.raises(ValueError, match="5 query heads are not a multiple of 2"):
    flash_attention(q[:, :, :5], k, v)
