"""What the op tells `pallas_kernels.report` about itself."""

import functools
import itertools
from collections.abc import Mapping

import jax.numpy as jnp

from pallas_kernels.grouped_matmul import report_shape, tpu, tuning
from pallas_kernels.grouped_matmul.report_shape import SHAPE as SHAPE
from pallas_kernels.grouped_matmul.visits import every_group, every_tile
from pallas_kernels.report_case import Case


def make_case(
  chip: str, shape: Mapping[str, int], blocks: Mapping[str, int] | None
) -> Case:
  """The kernel of one direction; see `report_case`."""
  direction = shape["direction"]
  M, D, F = shape["rows"], shape["features"], shape["hidden"]
  if direction == 1:
    D, F = F, D
  if blocks:
    tiles = tuning.Tiles(**blocks)
  elif direction == 2:
    tiles = tuning.for_outer(shape["bits"] // 8, chip)
  else:
    tiles = tuning.for_multiply(D, shape["bits"] // 8, chip)
  tiles = tiles.fit(M, D, F)
  sizes = jnp.asarray(report_shape.group_sizes(shape))
  if direction == 2:
    visits = every_group(sizes, M, tiles.rows)
    function = functools.partial(tpu.outer, dtype=jnp.float32, tiles=tiles)
  else:
    visits = every_tile(sizes, M, tiles.rows)

    def function(x, w, sizes):
      return tpu.multiply(
        x, w, sizes, transpose_w=direction == 1, dtype=x.dtype, tiles=tiles
      )

  return report_shape.make_case(
    shape,
    tiles._asdict(),
    function,
    "grouped_matmul_outer" if direction == 2 else "grouped_matmul",
    # The number of grid steps is the kernel's first operand.
    [visits.count, *visits[:3]],
  )


def candidates(chip: str, shape: Mapping[str, int]) -> list[dict[str, int]]:
  """Block sizes to search; those that do not fit are refused on the way."""
  if shape["direction"] == 2:
    grid = itertools.product((512, 1024), (256,), (1024, 2048), (1024, 2048))
  else:
    grid = itertools.product((256, 512), (128, 256), (1024, 2048), (2048, 4096))
  return [dict(zip(tuning.Tiles._fields, sizes)) for sizes in grid]
