"""The report: figures of the recorded sample, layouts, the command line."""

import dataclasses
import json
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import report, report_chips, report_read
from pallas_kernels.flash_attention import report as flash
from pallas_kernels.flash_attention import report_shape
from pallas_kernels.report_case import Case, Part
from tests.pallas_kernels import schedule_sample as sample

CHIP = report_chips.CHIPS["v5e"]
HLO = """
  %table.1 = s8[4,4]{1,0:T(4,128)(4,1)} parameter(0)
  %sample.1 = f32[32,128]{1,0:T(8,128)} custom-call(%table.1, %x.1, %w.1), x="y"
"""


def sample_case(**changes):
  part = dict(
    name="forward",
    kernels=("sample",),
    useful_flops=1e6,
    scalars={"sample": [sample.TABLE]},
  )
  return Case(
    blocks={"rows": 8},
    function=sample.call,
    args=(),
    parts=(Part(**part | changes),),
  )


def sample_figures(**changes):
  case = sample_case(**changes)
  (row,) = report_read.read_case(case, sample.DATA, HLO, CHIP)
  return row


def test_figures_of_the_sample():
  row = sample_figures()
  # 10 steps with the middle region, 6 without, 2 at the pipeline's ends.
  assert sum(row.steps.values()) == 18
  assert row.steps[row.steady_bundles] == 5  # the middle: columns 1 and 2
  assert row.hbm_bytes == 4 * (32 * 512 + 128 * 128 + 32 * 128)
  assert row.hbm_us == pytest.approx(row.hbm_bytes / 819e3)
  assert row.schedule_us == pytest.approx(row.kernel_bundles / 1503, rel=1e-3)
  assert row.peak_us == pytest.approx(1e6 / 197e6)
  assert row.bound_us == row.schedule_us > max(row.hbm_us, row.peak_us)
  many = sample_figures(useful_flops=1e12)
  assert many.bound_us == many.peak_us == pytest.approx(1e12 / 197e6)
  assert row.flops_per_bundle == 1e6 / row.kernel_bundles
  assert row.fills == row.spills == row.core_fills == row.unknown == 0
  # The loop of the middle region, with all but one of the matmuls.
  assert row.core_bundles == 25
  assert 0 < row.occupancy < row.core_occupancy < 1


def test_scalars_decide_what_runs():
  run_all = sample_figures(scalars={"sample": [np.ones((4, 4), np.int8)]})
  run_none = sample_figures(scalars={"sample": [np.zeros((4, 4), np.int8)]})
  unknown = sample_figures(scalars={})
  bundles = [
    row.kernel_bundles for row in (run_none, sample_figures(), run_all, unknown)
  ]
  assert bundles[0] < bundles[1] < bundles[2] == bundles[3]
  assert (run_all.unknown, unknown.unknown) == (0, 1)


def test_a_kernel_that_was_not_compiled_is_named():
  with pytest.raises(ValueError, match=r"'other' was compiled.*sample\.1"):
    sample_figures(kernels=("other",))


def test_what_is_outside_of_the_kernels():
  row = sample_figures()
  beside = sample_case(kernels=("samp", "sample.1.x"), scalars={})
  bundles, moved = report_read.outside(beside, sample.DATA)
  assert bundles > row.kernel_bundles  # nothing is known of its scalars
  assert moved == row.hbm_bytes
  assert report_read.outside(sample_case(), sample.DATA) == (0, 0)


def lookup(words, row, column, rows_of_a_tile, packed, columns):
  """The definition of a tiled layout, an element at a time."""
  tiles_across = -(-columns // 128)
  tile = row // rows_of_a_tile * tiles_across + column // 128
  in_tile = row % rows_of_a_tile // packed * 128 + column % 128
  word = words[tile * (rows_of_a_tile // packed * 128) + in_tile]
  bits = 32 // packed
  part = (word >> (row % packed * bits)) & (2**bits - 1)
  return part - 2**bits if part >> (bits - 1) else part


@given(
  shape=st.tuples(st.integers(1, 20), st.integers(1, 300)),
  tile=st.sampled_from(
    [(8, "int8", 4), (4, "int8", 4), (8, "int16", 2), (8, "int32", 1)]
  ),
  seed=st.integers(0, 9),
)
def test_words_lie_as_the_layout_says(shape, tile, seed):
  high, dtype, packed = tile
  info = np.iinfo(dtype)
  array = np.random.default_rng(seed).integers(
    info.min, info.max, shape, dtype, endpoint=True
  )
  packing = f"({packed},1)" if packed > 1 else ""
  words = report_read.words_in_memory(array, f"1,0:T({high},128){packing}")
  for row, column in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, 0)):
    found = lookup(words, row, column, high, packed, shape[1])
    assert found == array[row, column]


def test_words_of_vectors_and_of_more_dimensions():
  words = report_read.words_in_memory(np.arange(5, dtype=np.int32), "0:T(128)")
  assert words[:6] == [0, 1, 2, 3, 4, 0]
  array = np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4)
  words = report_read.words_in_memory(array, "2,1,0:T(4,128)S(1)")
  assert words[4 * 128 + 128 + 2] == array[1, 1, 2]


@pytest.mark.parametrize(
  "layout", ["", "0,1:T(8,128)(4,1)", "1,0:T(8,128)", "1,0:T(8,128)(2,1)"]
)
def test_other_layouts_are_refused(layout):
  with pytest.raises(ValueError, match="cannot lay out"):
    report_read.words_in_memory(sample.TABLE, layout)


def test_chips():
  clocks = {
    name: chip.bundles_per_second / 1e9
    for name, chip in report_chips.CHIPS.items()
  }
  wanted = {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75}
  assert clocks == pytest.approx(wanted, rel=3e-3)
  assert report_chips.chip_of("v5p:2x2x1") == "v5p"
  with pytest.raises(ValueError, match="got 'v2:2x2'"):
    report_chips.chip_of("v2:2x2")


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("segments", [0, 1, 3])
def test_unmasked_scores(causal, segments):
  shape = report_shape.SHAPE | dict(
    length=12, batch=2, heads=5, causal=causal, segments=segments
  )
  index = np.arange(12)
  ids = report_shape.segment_ids(shape | dict(segments=max(1, segments)))
  mask = ids[:, :, None] == ids[:, None, :]
  if causal:
    mask = mask & (index[:, None] >= index)
  assert report_shape.unmasked_scores(shape) == 5 * mask.sum()


def test_a_search_sorts_and_goes_on_after_a_failure(monkeypatch, capsys):
  def figures(case, topology, folder):
    if case == 3:
      raise RuntimeError("out of VMEM\nin 100 lines")
    row = sample_figures(useful_flops=case)
    return [dataclasses.replace(row, blocks={"rows": case})]

  module = types.SimpleNamespace(
    candidates=lambda chip, shape: [dict(rows=rows) for rows in (1, 3, 2)],
    make_case=lambda chip, shape, blocks: blocks["rows"],
  )
  monkeypatch.setattr(report, "figures", figures)
  found = report.search(module, "v5e:2x2", {}, "")
  assert [row.useful_flops for row in found["forward"]] == [2, 1]
  assert "rows=3: out of VMEM\n" in capsys.readouterr().err


def test_an_entry_prefers_what_does_not_spill():
  row = sample_figures()
  spilling = dataclasses.replace(row, core_spills=1, blocks={"rows": 16})
  module = types.SimpleNamespace(table_entry=lambda *args: args)
  entry = lambda rows: report.best_entry(
    module, "v6e:2x2", {"head_dim": 64}, {"forward": rows}
  )
  assert entry([spilling, row]) == (
    "v6e",
    {"head_dim": 64},
    {"forward": {"rows": 8}},
  )
  assert entry([spilling])[2] == {"forward": {"rows": 16}}
  bare = report.best_entry(types.ModuleType("peer"), "v6e:2x2", {}, {})
  assert bare == "('v6e', {}, {})"


def test_the_table_has_a_line_a_row_under_its_heads():
  text = report.table([("ours forward", sample_figures())])
  head, line = text.splitlines()
  assert line.startswith("ours forward ")
  assert line.split()[2:4] == [
    str(sample_figures().steady_bundles),
    str(sample_figures().kernel_bundles),
  ]
  assert head.index("blocks") == line.index("rows=8")
  json.dumps(sample_figures().as_json())


def test_settings():
  assert report.settings(["a=4", "b=8"], {"a", "b"}) == {"a": 4, "b": 8}
  for word in ("c=4", "a", "a=x"):
    with pytest.raises(ValueError, match=r"NAME=SIZE with a name of \['a'\]"):
      report.settings([word], ["a"])


def test_blocks_of_both_directions_reach_the_kernels():
  shape = flash.SHAPE | dict(length=1024)
  sizes = (256, 128, 128), (512, 256, 256)
  names = flash.SIZES + flash.BACKWARD_SIZES
  case = flash.make_case("v6e", shape, dict(zip(names, sizes[0] + sizes[1])))
  assert tuple(case.blocks.values()) == sizes[0] + sizes[1]
  program = str(jax.make_jaxpr(case.function)(*case.args))
  # The last dimension of the backward grid, the third of the forward one.
  assert "grid=(1, 1, 4, 1)" in program
  assert "grid=(1, 1, 1, 2)" in program


def test_the_best_blocks_become_a_line_of_the_table():
  best = {
    "backward": dict(zip(flash.BACKWARD_SIZES, (512, 256, 128))),
    "forward": dict(zip(flash.SIZES, (1024, 512, 256))),
  }
  line = flash.table_entry("v6e", flash.SHAPE, best)
  assert (
    line == "('v6e', 128): (Blocks(1024, 512, 256), Blocks(512, 256, 128)),"
  )


@pytest.mark.tpu_compiler
def test_the_peer_is_compiled_and_read():
  shown = subprocess.run(
    [
      *(sys.executable, "-m", "pallas_kernels.report", "--op=flash_attention"),
      *("--peer=splash", "--only_peer", "--shape=length=2048"),
    ],
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  rows = [
    json.loads(line) for line in shown.splitlines() if line.startswith("{")
  ]
  outside = rows.pop()
  # At the very least, the sum of two bf16 [2048, 128] to one gradient.
  assert outside["name"] == "splash outside"
  assert outside["hbm_bytes"] >= 3 * 2048 * 128 * 2
  assert [row["part"] for row in rows] == ["forward", "backward"]
  for row in rows:
    # 4 tiles of 1024 x 1024, of which the mask empties one.
    assert sum(row["steps"].values()) == 4 + 2
    assert row["unknown"] == 0
    # bf16 q, k, v, o (and the gradients) at the very least.
    assert row["hbm_bytes"] >= 4 * 2048 * 128 * 2
    peak = CHIP.flops_per_bundle
    assert 0.2 * peak < row["flops_per_bundle"] < 1.1 * peak
