"""Imports only go down; the walls of the house, checked by walking the source.

A room may import its own modules and rooms on lower floors. Only a main (a
module that runs under `if __name__ == "__main__"`) may reach up, and only to
`configs.cli`. Imports inside functions and under TYPE_CHECKING count as well.
"""

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_FLOORS = {
  "configs": 5,
  "plan": 4,
  "evals": 4,
  "align": 3,
  "compress": 3,
  "train": 2,
  "serve": 2,
  "model": 1,
  "pallas_kernels": 0,
  "sharding": 0,
  "data": 0,
}
# They may import every room; no room may import them.
_BESIDE = ("benchmarks", "examples", "tests")


def _sources(root: pathlib.Path) -> list[pathlib.Path]:
  return sorted(p for room in _FLOORS for p in (root / room).rglob("*.py"))


def _imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
  """Yields (line, dotted name) of all that a module of `package` imports."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
      parts = package.split(".")
      parts = parts[: len(parts) - node.level + 1] if node.level else []
      base = ".".join(parts + ([node.module] if node.module else []))
      for alias in node.names:
        yield node.lineno, f"{base}.{alias.name}"
    elif isinstance(node, ast.Call) and node.args:
      function = ast.unparse(node.func).rpartition(".")[2]
      name = node.args[0]
      if function in ("import_module", "__import__"):
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
          yield node.lineno, name.value


def _is_main(tree: ast.Module) -> bool:
  return any(
    isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
    for node in tree.body
  )


def _place(room: str) -> str:
  return f"{room} (floor {_FLOORS[room]})" if room in _FLOORS else room


def _violations(root: pathlib.Path) -> list[str]:
  """Returns "file:line: room (floor) imports room (floor)" of each breach."""
  found = []
  for path in _sources(root):
    relative = path.relative_to(root)
    room = relative.parts[0]
    tree = ast.parse(path.read_text(), str(path))
    for line, name in _imports(tree, ".".join(relative.parent.parts)):
      other = name.partition(".")[0]
      if other == room or other not in (*_FLOORS, *_BESIDE):
        continue
      if other in _FLOORS and _FLOORS[other] < _FLOORS[room]:
        continue
      if _is_main(tree) and f"{name}.".startswith("configs.cli."):
        continue
      found.append(f"{relative}:{line}: {_place(room)} imports {_place(other)}")
  return sorted(set(found))


def test_imports_only_go_down():
  assert not (found := _violations(_ROOT)), "\n".join(found)


def test_the_walk_reaches_every_room():
  rooms = {path.relative_to(_ROOT).parts[0] for path in _sources(_ROOT)}
  folders = {p.parent.name for p in _ROOT.glob("*/__init__.py")}
  assert folders - set(_BESIDE) == rooms, "a room without a floor"
  assert {"configs", "model", "sharding"} <= rooms


@pytest.mark.parametrize(
  ("file", "source", "place"),
  [
    ("model/a.py", "\nimport train.step", "2: model (floor 1) imports train"),
    ("model/a.py", "from train import step", "1: model (floor 1) imports"),
    ("model/a.py", "def f():\n  from serve import x", "2: model (floor 1)"),
    ("model/families/a.py", "from ...train import x", "1: model (floor 1)"),
    (
      "data/a.py",
      "import typing\nif typing.TYPE_CHECKING:\n  import sharding.axes",
      "3: data (floor 0) imports sharding (floor 0)",
    ),
    (
      "train/a.py",
      "import serve",
      "1: train (floor 2) imports serve (floor 2)",
    ),
    (
      "train/a.py",
      "import jax, tests.conftest",
      "1: train (floor 2) imports te",
    ),
    ("evals/a.py", "import plan", "1: evals (floor 4) imports plan (floor 4)"),
    ("align/a.py", "from examples import x", "1: align (floor 3) imports exam"),
    (
      "sharding/a.py",
      "import importlib\nimportlib.import_module('model.config')",
      "2: sharding (floor 0) imports model (floor 1)",
    ),
    # A module that is no main, and a main that takes more than the cli.
    (
      "train/a.py",
      "from configs import cli",
      "1: train (floor 2) imports conf",
    ),
    (
      "train/a.py",
      "from configs import cli, demo\nif __name__ == '__main__':\n  cli.x()",
      "1: train (floor 2) imports configs (floor 5)",
    ),
  ],
)
def test_a_planted_breach_is_named(tmp_path, file, source, place):
  (tmp_path / file).parent.mkdir(parents=True)
  (tmp_path / file).write_text(source)
  (found,) = _violations(tmp_path)
  assert found.startswith(f"{file}:{place}")


@pytest.mark.parametrize(
  ("file", "source"),
  [
    ("train/a.py", "from model import config\nimport data.loader, train.step"),
    ("model/a.py", "from . import b\nfrom .b import c\nimport modelling, jax"),
    ("model/families/a.py", "from .. import config\nfrom ..config import X"),
    ("configs/a.py", "import align.dpo, evals, data"),
    (
      "train/a.py",
      "def f():\n  from configs import cli\nif __name__ == '__main__':\n  f()",
    ),
  ],
)
def test_what_goes_down_is_free(tmp_path, file, source):
  (tmp_path / file).parent.mkdir(parents=True)
  (tmp_path / file).write_text(source)
  assert not _violations(tmp_path)


def test_configs_import_no_jax():
  """So that --help, planners and notebooks read them in an instant."""
  light = [
    path
    for path in _sources(_ROOT)
    if path.parent.name == "configs"
    or path.name == "axes.py"
    or path.stem.endswith("config")
  ]
  names = [
    ".".join(path.relative_to(_ROOT).with_suffix("").parts) for path in light
  ]
  assert "model.config" in names and "sharding.axes" in names
  code = (
    "import importlib, sys\n"
    f"for name in {names}:\n"
    "  importlib.import_module(name)\n"
    "  heavy = {'jax', 'flax', 'orbax', 'grain', 'torch'} & set(sys.modules)\n"
    "  assert not heavy, f'{name} imports {heavy}'\n"
  )
  got = subprocess.run(
    [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True
  )
  assert got.returncode == 0, got.stderr


def test_package_files_are_empty():
  full = [p for p in _sources(_ROOT) if p.name == "__init__.py"]
  full = [str(p.relative_to(_ROOT)) for p in full if p.read_text().strip()]
  assert not full, "an import of a room must cost nothing"


def test_a_helper_lives_with_its_idea():
  paths = [p.relative_to(_ROOT).with_suffix("") for p in _sources(_ROOT)]
  junk = {"utils", "util", "common", "helpers", "misc"}
  found = [str(path) for path in paths if junk.intersection(path.parts)]
  assert not found


def test_files_are_short():
  paths = _sources(_ROOT)
  paths += [p for folder in _BESIDE for p in (_ROOT / folder).rglob("*.py")]
  sizes = {p.relative_to(_ROOT): len(p.read_text().splitlines()) for p in paths}
  long = {str(path): size for path, size in sizes.items() if size > 500}
  assert not long, "one idea a file: at most 500 lines"
