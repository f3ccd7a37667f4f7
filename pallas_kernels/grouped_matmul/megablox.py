"""JAX's own grouped matmul, as a peer of the report."""

import importlib
import itertools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import report_shape
from pallas_kernels.grouped_matmul.report_shape import SHAPE as SHAPE
from pallas_kernels.report_case import Case

# The package has a function of the module's name.
megablox = importlib.import_module(
  "jax.experimental.pallas.ops.tpu.megablox.gmm"
)
# Of a search at SHAPE on v5e, among those that fit the 16 MiB it leaves itself.
BEST = dict(m=256, k=4096, n=512)


def make_case(
  chip: str, shape: Mapping[str, int], blocks: Mapping[str, int] | None
) -> Case:
  """The kernel of one direction; see `report_case`."""
  del chip
  direction = shape["direction"]
  blocks = dict(blocks or BEST)
  tiling = blocks["m"], blocks["k"], blocks["n"]
  metadata, count = megablox.make_group_metadata(
    group_sizes=jnp.asarray(report_shape.group_sizes(shape)),
    m=shape["rows"],
    tm=blocks["m"],
    start_group=jnp.array(0, jnp.int32),
    num_nonzero_groups=shape["groups"],
    visit_empty_groups=direction == 2,
  )

  def function(x, y, sizes):
    if direction == 2:
      # As its own gradient does: the kernel turns the rows back.
      return megablox.tgmm(x.swapaxes(0, 1), y, sizes, jnp.float32, tiling)
    return megablox.gmm(
      x, y, sizes, x.dtype, tiling, transpose_rhs=direction == 1
    )

  return report_shape.make_case(
    shape,
    blocks,
    function,
    "tgmm" if direction == 2 else "gmm",
    [count, *metadata, np.zeros((1,))],
  )


def candidates(chip: str, shape: Mapping[str, int]) -> list[dict[str, int]]:
  """Block sizes to search; those that do not fit are refused on the way."""
  del chip, shape
  grid = itertools.product((256, 512), ((1024, 1024), (2048, 512), (4096, 512)))
  return [dict(m=m, k=k, n=n) for m, (k, n) in grid]
