"""The matrix is worth something: a broken rule turns it red."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.tolerances import tolerance
from tests.train.breaks import BREAKS

ROOT = pathlib.Path(__file__).parents[2]
BOUND = tolerance("mesh")["rtol"]


def test_every_edit_finds_its_text():
  for broken in BREAKS:
    text = (ROOT / broken.file).read_text()
    assert text.count(broken.old) == 1, broken.rule
    broken.comparison()


@pytest.mark.slow
@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.rule)
def test_matrix_goes_red(broken, tmp_path):
  tree = tmp_path / "tree"
  hidden = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "docs")
  shutil.copytree(ROOT, tree, ignore=hidden)
  path = tree / broken.file
  path.write_text(path.read_text().replace(broken.old, broken.new))
  result = subprocess.run(
    [sys.executable, "-m", "tests.train.matrix_cells", "break", broken.rule],
    cwd=tree,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr[-3000:]
  found = json.loads(result.stdout.splitlines()[-1])
  # It must be wrong, not broken: an exception would prove nothing.
  assert "error" not in found, found["error"]
  kinds = ("moments", "params", "metrics")
  far = [d for kind in kinds for d in found[kind].values() if not d <= BOUND]
  assert far, "no distance is above the bound"
