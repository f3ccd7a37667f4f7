"""Block sizes of the TPU kernels.

Found with `python -m pallas_kernels.report --op=grouped_matmul --search`: the
fewest bundles of the whole kernel for 16384 rows of 8 ragged groups, D 4096 and
F 14336, bf16, among those whose HBM time is below their schedule; v5p as v5e,
whose core it has. float32 was not searched. All of them spill registers, as
XLA's own matmul does: a tile's sums are more than the registers hold, and
smaller ones feed the matrix unit, which is full between the first and the last
matmul of a tile, no better but begin and end more often.
"""

from typing import NamedTuple

from pallas_kernels.chips import VMEM, this_chip

LANES = 128


class Tiles(NamedTuple):
  """How a kernel cuts its work.

  Attributes:
    rows: of a tile.
    chunk: rows of a part of a tile that several groups share.
    cols: features of the result, in its last dim, that a grid step computes.
    depth: in `multiply`, features that one matmul sums over; in `outer`,
      features of the result's other dim.
  """

  rows: int
  chunk: int
  cols: int
  depth: int

  def fit(self, M: int, D: int, F: int) -> "Tiles":
    """The same, cut to the sizes: no block is larger than its array.

    Args:
      M: number of rows.
      D: features that `depth` cuts.
      F: features that `cols` cuts.
    """
    chunk = min(self.chunk, -(-M // 16) * 16)
    rows = min(self.rows, -(-M // chunk) * chunk)
    # Parts of nearly equal depth, whole vectors but for the last.
    unit = min(LANES, self.depth)
    parts = -(-D // self.depth)
    depth = D if parts == 1 else -(-D // (parts * unit)) * unit
    return Tiles(rows, chunk, min(self.cols, F), depth)


# (chip, bits of the operands) -> tiles.
_MULTIPLY = {
  ("v5e", 16): Tiles(256, 128, 2048, 4096),
  ("v5e", 32): Tiles(256, 128, 512, 512),
  ("v5p", 16): Tiles(256, 128, 2048, 4096),
  ("v5p", 32): Tiles(256, 128, 512, 512),
  ("v6e", 16): Tiles(512, 128, 2048, 4096),
  ("v6e", 32): Tiles(512, 256, 1024, 512),
}
_OUTER = {
  ("v5e", 16): Tiles(512, 256, 2048, 2048),
  ("v5e", 32): Tiles(256, 128, 512, 512),
  ("v5p", 16): Tiles(512, 256, 2048, 2048),
  ("v5p", 32): Tiles(256, 128, 512, 512),
  ("v6e", 16): Tiles(512, 256, 2048, 2048),
  ("v6e", 32): Tiles(512, 256, 1024, 512),
}


def for_multiply(D: int, operand_bytes: int, chip: str | None = None) -> Tiles:
  """Tiles of `tpu.multiply`.

  Args:
    D: features that it sums over, all of which stand in fast memory.
    operand_bytes: of a number that is multiplied.
    chip: "v5e", ...; None: that of the program being traced.
  """

  def num_bytes(tiles):
    rows, _, cols, _ = tiles
    # Two blocks of each operand and of the result, and its sum.
    return (rows + cols) * 2 * D * operand_bytes + rows * cols * 12

  return _largest(_MULTIPLY, operand_bytes, chip, num_bytes)


def for_outer(operand_bytes: int, chip: str | None = None) -> Tiles:
  """Tiles of `tpu.outer`; see `for_multiply`."""

  def num_bytes(tiles):
    rows, _, cols, depth = tiles
    return rows * (depth + cols) * 2 * operand_bytes + depth * cols * 8

  return _largest(_OUTER, operand_bytes, chip, num_bytes)


def vmem_limit(chip: str | None = None) -> int:
  """Bytes of fast memory that the compiler may give a kernel."""
  return (VMEM[chip or this_chip()] + 2) << 20


def _largest(table, operand_bytes: int, chip: str | None, num_bytes) -> Tiles:
  """The nearest entry of a table, cut until it fits fast memory."""
  chip = chip or this_chip()
  near = lambda key: (key[0] != chip, abs(key[1] - 8 * operand_bytes))
  tiles = table[min(table, key=near)]
  while num_bytes(tiles) > VMEM[chip] << 20:
    rows, chunk, cols, depth = tiles
    if max(rows, cols) == LANES:
      break  # The compiler will say what it has.
    if cols >= rows:
      cols //= 2
    else:
      rows //= 2
    tiles = Tiles(rows, min(chunk, rows), cols, depth)
  return tiles
