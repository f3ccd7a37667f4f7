"""Every composition of mesh axes equals one device; see `matrix.py`.

Loss, gradients (as the first moments), global norm, clip factor and weights,
in float32.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.tolerances import tolerance
from tests.train import matrix

ROOT = pathlib.Path(__file__).parents[2]
BOUND = tolerance("mesh")["rtol"]
# Weights with moments of their own: 16 kinds in the dense model.
LEAVES = 16


@functools.cache
def run(part: str, group: str) -> dict[str, dict]:
  """Runs a group of cells; returns what each of them printed."""
  result = subprocess.run(
    [sys.executable, "-m", "tests.train.matrix_cells", part, group],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  lines = [line for line in result.stdout.splitlines() if line[:1] == "{"]
  found = {cell.pop("cell"): cell for cell in map(json.loads, lines)}
  if result.returncode:
    found["error"] = f"exit code {result.returncode}: {result.stderr[-3000:]}"
  return found


def check(part: str, cell: matrix.Cell):
  """All leaves of a cell are there and within the bound."""
  found = run(part, cell.group)
  assert cell.name in found, found.get("error")
  assert "error" not in found[cell.name], found[cell.name]["error"]
  for kind, count in dict(moments=LEAVES, params=LEAVES, metrics=16).items():
    distances = found[cell.name][kind]
    assert len(distances) >= count, list(distances)
    far = {name: d for name, d in distances.items() if not d <= BOUND}
    assert not far, far


def params(cells: list[matrix.Cell], part: str) -> list:
  """Cells of a group go to one worker."""
  return [
    pytest.param(
      cell,
      id=cell.name,
      marks=pytest.mark.xdist_group(f"matrix-{part}-{cell.group}"),
    )
    for cell in cells
  ]


@pytest.mark.parametrize("cell", params(matrix.cover(), "cover"))
def test_equals_one_device(cell):
  check("cover", cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", params(matrix.whole(), "whole"))
def test_equals_one_device_in_every_combination(cell):
  check("whole", cell)


def test_the_cover_covers():
  """Every mesh meets every value of two, and no value of more is left out."""
  meet = {
    (cell.mesh, key, value)
    for cell in matrix.cover()
    for key, value in cell.settings
  }
  for mesh in matrix.meshes():
    for key, choices in matrix.factors(mesh).items():
      met = [value for value in choices if (mesh, key, value) in meet]
      assert len(met) >= min(2, len(choices)), (mesh, key, met)
  for key, factor in matrix.FACTORS.items():
    met = {value for _, other, value in meet if other == key}
    assert met >= set(factor.values), (key, met)


def test_names_are_unique():
  for part in (matrix.cover(), matrix.whole()):
    assert len({cell.name for cell in part}) == len(part)
