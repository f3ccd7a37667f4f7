"""The attention that the report speaks of, ours and that of peers."""

from collections.abc import Mapping

import numpy as np

SHAPE = dict(
  batch=1, heads=1, kv_heads=1, length=4096, head_dim=128, causal=1, segments=0
)
# Matmuls of 2 H FLOPs a score: two forward; five backward, with that of the
# scores once more.
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10


def unmasked_scores(shape: Mapping[str, int]) -> int:
  """Pairs of a query and a key that it sees, in all heads.

  Args:
    shape: as `SHAPE`; `segments` documents of equal length, 0: one.
  """
  documents = max(1, shape["segments"])
  length = shape["length"] // documents
  pairs = length * (length + 1) // 2 if shape["causal"] else length * length
  return shape["batch"] * shape["heads"] * documents * pairs


def segment_ids(shape: Mapping[str, int]) -> np.ndarray:
  """int32 [B, T]: documents of equal length, counted from 1."""
  ids = np.arange(shape["length"]) * shape["segments"] // shape["length"] + 1
  return np.broadcast_to(ids.astype(np.int32), (shape["batch"], len(ids)))
