"""A checkpoint of any layout restores onto any other, which goes on equally."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.tolerances import tolerance
from tests.train import restore_cells

ROOT = pathlib.Path(__file__).parents[2]
BOUND = tolerance("mesh")["rtol"]
# One worker: the pairs are computed in one process.
pytestmark = pytest.mark.xdist_group("train_restore")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
  """What each pair printed."""
  result = subprocess.run(
    [sys.executable, "-m", "tests.train.restore_cells"]
    + [str(tmp_path_factory.mktemp("layouts"))],
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


@pytest.mark.parametrize("target", restore_cells.LAYOUTS)
@pytest.mark.parametrize("source", restore_cells.LAYOUTS)
def test_goes_on_equally(found, source, target):
  cell = f"{source} {target}"
  assert cell in found, found.get("error")
  assert found[cell]["bitwise"] and found[cell]["placed"]
  for part, count in {"state": 50, "metrics": 9}.items():
    distances = found[cell][part]
    assert len(distances) >= count, list(distances)
    far = {name: d for name, d in distances.items() if not d <= BOUND}
    assert not far, far
