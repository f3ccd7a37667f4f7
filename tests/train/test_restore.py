"""A checkpoint of any layout restores onto any other, which goes on equally."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.tolerances import tolerance
from tests.train.restore_cells import FEW, LAYOUTS

ROOT = pathlib.Path(__file__).parents[2]
BOUND = tolerance("mesh")["rtol"]
# One worker: the pairs are computed in one process.
pytestmark = pytest.mark.xdist_group("train_restore")


@functools.cache
def found(names, folder):
  """What each pair of some layouts printed."""
  result = subprocess.run(
    [sys.executable, "-m", "tests.train.restore_cells", str(folder), *names],
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Where layouts save."""
  return tmp_path_factory.mktemp("layouts")


def check(found, cell):
  assert cell in found, found.get("error")
  assert found[cell]["bitwise"] and found[cell]["placed"]
  for part, count in {"state": 50, "metrics": 9}.items():
    distances = found[cell][part]
    assert len(distances) >= count, list(distances)
    far = {name: d for name, d in distances.items() if not d <= BOUND}
    assert not far, far


@pytest.mark.parametrize("target", FEW)
@pytest.mark.parametrize("source", FEW)
def test_goes_on_equally(folder, source, target):
  check(found(FEW, folder / "few"), f"{source} {target}")


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_any_layout_from_any_other(folder, source, target):
  check(found(tuple(LAYOUTS), folder / "all"), f"{source} {target}")
