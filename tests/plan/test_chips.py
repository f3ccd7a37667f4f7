"""The table of chips against the other figures of the code base."""

import pytest

from pallas_kernels import report_chips
from plan.chips import CHIPS, parse
from train import peak


def test_peaks_are_those_that_runs_are_measured_against():
  kinds = {
    "v4": "TPU v4",
    "v5e": "TPU v5e",
    "v5p": "TPU v5p",
    "v6e": "TPU v6e",
    "a100": "NVIDIA A100",
    "h100": "NVIDIA H100",
    "h200": "NVIDIA H200",
  }
  assert set(kinds) == set(CHIPS) >= set(report_chips.CHIPS)
  for name, kind in kinds.items():
    assert CHIPS[name].flops["bfloat16"] == peak._BFLOAT16_FLOPS[kind]


def test_every_row_has_a_source_and_a_sane_size():
  for chip in CHIPS.values():
    assert chip.sources
    # An op is bound by compute above some hundred FLOPs a byte, on all.
    ridge = chip.flops["bfloat16"] / chip.hbm_bytes_per_second
    assert 100 < ridge < 600
    assert chip.flops["float32"] < chip.flops["bfloat16"] <= chip.flops["int8"]
    slower = chip.slow_bytes_per_second, chip.fast_bytes_per_second
    assert slower[0] < slower[1] < chip.hbm_bytes_per_second


@pytest.mark.parametrize(
  ("name", "both_ways"),
  [("v5e", 400e9), ("v5p", 1200e9), ("v6e", 800e9), ("h100", 900e9)],
)
def test_links_add_up_to_the_published_bandwidth(name, both_ways):
  assert 2 * CHIPS[name].fast_bytes_per_second == both_ways


@pytest.mark.parametrize(
  ("text", "shape", "slices"),
  [
    ("v5e:4x4", (4, 4), 1),
    ("v5p:4x4x8", (4, 4, 8), 1),
    ("v6e:2x(16x16)", (16, 16), 2),
    ("h100:8", (8,), 1),
    ("h200:16x8", (8,), 16),
  ],
)
def test_topologies(text, shape, slices):
  found = parse(text)
  assert (found.shape, found.num_slices) == (shape, slices)
  size = 1
  for n in shape:
    size *= n
  assert found.num_devices == slices * size


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("v7:4x4", "there are figures of v4, v5e, v5p, v6e, a100, h100, h200"),
    ("v5e", "wanted v5e:AxB of at most 256 chips"),
    ("v5e:4x4x4", "wanted v5e:AxB"),
    ("v5p:4x4", "wanted v5p:AxBxC"),
    ("v5e:32x16", "at most 256"),
    ("h100:2x16", "h100:NODESx8"),
    ("v5e:0x4", "wanted v5e:AxB"),
  ],
)
def test_other_topologies_are_refused(text, words):
  with pytest.raises(ValueError, match=words):
    parse(text)
