"""What the report must know of a chip."""

from typing import NamedTuple


class Chip(NamedTuple):
  """Public figures of one core of a chip.

  Attributes:
    peak_flops: bf16, of all its cores.
    cores: that each run a kernel of their own.
    flops_per_bundle: bf16, with all matrix units busy.
    hbm_bytes_per_second: of all its cores.
  """

  peak_flops: float
  cores: int
  flops_per_bundle: int
  hbm_bytes_per_second: float

  @property
  def bundles_per_second(self) -> float:
    """The clock that the peak implies: 1.5, 1.75, 1.75, 1.05 GHz."""
    return self.peak_flops / self.cores / self.flops_per_bundle


# Peaks and bandwidths: https://cloud.google.com/tpu/docs/v4, v5e, v5p, v6e.
# Matrix units: 4 of 128 x 128 a core; v6e does the work of 4 of 256 x 256 (two
# of them, by its page; each takes 2 rows a bundle, by the schedule of a plain
# matmul: 265 kFLOP a slot against 36 kFLOP on v5e).
CHIPS = {
  "v4": Chip(275e12, 2, 4 * 128 * 128 * 2, 1228e9),
  "v5e": Chip(197e12, 1, 4 * 128 * 128 * 2, 819e9),
  "v5p": Chip(459e12, 2, 4 * 128 * 128 * 2, 2765e9),
  "v6e": Chip(918e12, 1, 4 * 256 * 256 * 2, 1640e9),
}


def chip_of(topology: str) -> str:
  """ "v5e" of "v5e:2x2".

  Raises:
    ValueError: its figures are not in the table.
  """
  name = topology.split(":")[0]
  if name not in CHIPS:
    raise ValueError(f"topology must be of {sorted(CHIPS)}, got {topology!r}")
  return name
