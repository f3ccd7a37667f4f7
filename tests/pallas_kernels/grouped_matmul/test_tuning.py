"""Block sizes, cut to the sizes and to the memory that there is."""

import pytest

from pallas_kernels.grouped_matmul import tuning
from pallas_kernels.grouped_matmul.tuning import Tiles


@pytest.mark.parametrize(
  ("M", "D", "F", "expected"),
  [
    (9999, 8192, 9999, Tiles(512, 128, 1024, 4096)),
    # One matmul for all features, and as they are, where they are few.
    (9999, 520, 200, Tiles(512, 128, 200, 520)),
    # Parts of equal depth.
    (9999, 5120, 9999, Tiles(512, 128, 1024, 2560)),
    (9999, 8200, 9999, Tiles(512, 128, 1024, 2816)),
    # Whole chunks; a chunk is whole sublanes of bf16.
    (300, 512, 512, Tiles(384, 128, 512, 512)),
    (17, 512, 512, Tiles(32, 32, 512, 512)),
    (1, 512, 512, Tiles(16, 16, 512, 512)),
  ],
)
def test_blocks_are_no_larger_than_arrays(M, D, F, expected):
  assert Tiles(512, 128, 1024, 4096).fit(M, D, F) == expected


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
@pytest.mark.parametrize("operand_bytes", [2, 4])
@pytest.mark.parametrize("D", [128, 4096, 28672])
def test_blocks_are_whole_vectors_and_chunks(chip, operand_bytes, D):
  for tiles in (
    tuning.for_multiply(D, operand_bytes, chip),
    tuning.for_outer(operand_bytes, chip),
  ):
    assert tiles.rows % tiles.chunk == 0 and tiles.chunk % 16 == 0
    assert tiles.cols % 128 == 0 and tiles.depth % 128 == 0


def test_long_rows_take_smaller_blocks():
  wide = lambda D: tuning.for_multiply(D, 2, "v6e")
  assert wide(4096) == tuning._MULTIPLY["v6e", 16]
  assert wide(28672).rows * wide(28672).cols < wide(4096).rows * 1024


def test_a_chip_without_an_entry_takes_one_that_fits():
  rows, _, cols, _ = tuning.for_multiply(4096, 2, "v4")
  assert (rows + cols) * 2 * 4096 * 2 <= 14 << 20
