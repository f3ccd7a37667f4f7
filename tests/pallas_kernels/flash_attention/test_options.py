"""Masks as literal matrices."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention.options import Options, Rows, visible

T = 5
SEGMENTS = [[1, 1, 2, 2, 0]]


def mask(*, causal=True, window=None, index=None, segments=None):
  """The mask of one row as nested lists of 0 and 1."""
  index = jnp.asarray(np.arange(T)[None] if index is None else index)
  segments = None if segments is None else jnp.asarray(segments)
  rows = Rows(index, segments)
  options = Options(
    left=None if window is None else window - 1,
    right=0 if causal else None if window is None else window - 1,
    scale=1.0,
    soft_cap=None,
    dropout_rate=0.0,
    operands="float32",
    out_dtype="float32",
  )
  return np.asarray(visible(options, rows, rows))[0].astype(int).tolist()


@pytest.mark.parametrize(
  ("arguments", "want"),
  [
    (
      dict(causal=True),
      [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
      ],
    ),
    (dict(causal=False), [[1] * T] * T),
    (
      dict(causal=True, window=1),
      [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
      ],
    ),
    (
      dict(causal=True, window=3),
      [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
      ],
    ),
    (
      dict(causal=False, window=2),
      [
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
        [0, 0, 0, 1, 1],
      ],
    ),
    (
      dict(causal=True, segments=SEGMENTS),
      [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0],
      ],
    ),
    (
      dict(causal=False, segments=SEGMENTS),
      [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0],
      ],
    ),
    # Left padding, and a window that counts positions, not rows.
    (
      dict(
        causal=True,
        window=2,
        index=[[0, 0, 1, 2, 5]],
        segments=[[0, 1, 1, 1, 1]],
      ),
      [
        [0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
      ],
    ),
  ],
  ids=str,
)
def test_masks(arguments, want):
  assert mask(**arguments) == want


def test_cut_takes_the_same_rows_of_both():
  rows = Rows(jnp.arange(T)[None], jnp.asarray(SEGMENTS))
  cut = rows.cut(1, 4)
  assert cut.index.tolist() == [[1, 2, 3]]
  assert cut.segment_ids.tolist() == [[1, 2, 2]]
  assert Rows(rows.index, None).cut(1, 4).segment_ids is None
