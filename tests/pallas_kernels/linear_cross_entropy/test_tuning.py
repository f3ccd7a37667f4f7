"""Block sizes: the nearest entry, cut until it fits."""

import pytest

from pallas_kernels.linear_cross_entropy import tuning


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
@pytest.mark.parametrize("D", [64, 576, 4096, 8192, 16384])
@pytest.mark.parametrize("num_bytes", [(2, 2), (2, 4), (4, 4)])
def test_blocks_fit(chip, D, num_bytes):
  blocks = tuning.find(D, num_bytes, chip)
  assert all(size >= 128 and size % 128 == 0 for size in blocks[:-1])
  assert blocks.tokens % blocks.rows == 0
  limit = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128}[chip] << 20
  smallest = tuning.Blocks(*[128] * 5)
  if tuning.vmem_bytes(smallest, D, num_bytes) < 0.8 * limit:
    assert tuning.vmem_bytes(blocks, D, num_bytes) < limit


def test_the_table_is_taken_as_it_is_where_it_fits():
  for (chip, bits), blocks in tuning.TABLE.items():
    num_bytes = (bits // 8, 4)
    assert tuning.find(4096, num_bytes, chip) == blocks
    assert tuning.find(2048, num_bytes, chip) == blocks


def test_an_unknown_chip_takes_the_nearest_entry():
  assert tuning.find(64, (2, 4), "v4").rows <= 512
