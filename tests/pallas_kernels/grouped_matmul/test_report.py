"""The schedule of our kernels beside that of JAX's own."""

import json
import subprocess
import sys

import pytest


@pytest.mark.tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("direction", [0, 2], ids=["forward", "backward w"])
def test_fewer_bundles_and_bytes_than_megablox(direction):
  # In a process of its own: the compiler reads its flags when it is loaded.
  printed = subprocess.run(
    [
      *(sys.executable, "-m", "pallas_kernels.report", "--op=grouped_matmul"),
      *("--topology=v5e:2x2", "--peer=megablox"),
      f"--shape=hidden=4096,direction={direction}",
    ],
    check=True,
    capture_output=True,
    text=True,
  ).stdout
  rows = (json.loads(l) for l in printed.splitlines() if l[:1] == "{")
  ours, theirs = (row for row in rows if "part" in row)
  # Branches that the reader cannot follow, and counts as taken.
  assert max(ours["unknown"], theirs["unknown"]) <= 1
  assert ours["kernel_bundles"] < 0.95 * theirs["kernel_bundles"]
  assert ours["hbm_bytes"] < 0.8 * theirs["hbm_bytes"]
  assert ours["occupancy"] > 0.97
