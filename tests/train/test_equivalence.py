"""The production step on 8 devices equals one device.

With packing, two micro-batches and rematerialisation on; the one device uses
none of these. Each group of cells runs in a process of its own, see
`mesh_cells.py`.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.tolerances import tolerance

ROOT = pathlib.Path(__file__).parents[2]
BOUND = tolerance("mesh")["rtol"]
# Distances between what differs must be far above the bound.
FAR = 100 * BOUND


@functools.cache
def cells(group: str) -> dict[str, dict]:
  """Runs a group; returns what each cell printed."""
  result = subprocess.run(
    [sys.executable, "-m", "tests.train.mesh_cells", group],
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


def close(distances: dict[str, float], count: int):
  """All leaves are there and within the bound."""
  assert len(distances) >= count, list(distances)
  far = {name: d for name, d in distances.items() if not d <= BOUND}
  assert not far, far


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(
  "group, mesh",
  [
    pytest.param(group, mesh, marks=pytest.mark.xdist_group(f"cells_{group}"))
    for group, mesh in [
      ("gqa", "8x1x1"),
      ("gqa", "1x8x1"),
      ("gqa", "2x2x2"),
      ("mha", "1x1x8"),
    ]
  ],
)
def test_equals_one_device(group, mesh, name):
  found = cells(group)
  cell = f"{mesh} {name}"
  assert cell in found, found.get("error")
  # 16 kinds of weights, untied one more; for sgd the momentum after the first
  # step is the gradient, leaf by leaf.
  close(found[cell]["moments"], 16)
  close(found[cell]["params"], 16)
  # Three steps of loss, global norm, clip factor, norm of the parameters...
  close(found[cell]["metrics"], 24)


@pytest.mark.xdist_group("cells_mha")
def test_dropout_masks_are_the_same_on_every_mesh():
  found = cells("dropout")
  assert "2x2x2 adamw" in found, found.get("error")
  close(found["2x2x2 adamw"]["params"], 16)
  close(found["2x2x2 adamw"]["metrics"], 24)


@pytest.mark.xdist_group("cells_kernels")
@pytest.mark.parametrize("mesh", ["2x1x1", "1x2x1", "1x1x2"])
def test_pallas_kernels_equal_one_device_without_them(mesh):
  """Of attention and of the loss, with packing and dropout."""
  found = cells("kernels")
  cell = f"{mesh} adamw"
  assert cell in found, found.get("error")
  close(found[cell]["moments"], 16)
  close(found[cell]["params"], 16)
  close(found[cell]["metrics"], 24)
