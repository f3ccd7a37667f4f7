"""The tree in README.md shows every file, and none that is gone."""

import pathlib

_ROOT = pathlib.Path(__file__).parents[1]


def _shown() -> set[str]:
  tree = (_ROOT / "README.md").read_text(encoding="utf-8").split("```")[1]
  shown, room = set(), ""
  for line in tree.strip().splitlines():
    name = line.split()[0]
    if not line.startswith(" "):
      room = name
    elif name.endswith(".py"):
      shown.add(room + name)
  return shown


def test_the_tree_is_that_of_the_code():
  packages = [p.parent for p in _ROOT.glob("*/__init__.py")]
  folders = {*packages, _ROOT / "examples", _ROOT / "benchmarks"}
  there = {
    str(path.relative_to(_ROOT))
    for folder in folders - {_ROOT / "tests"}
    for path in folder.rglob("*.py")
    if path.name != "__init__.py"
  }
  assert _shown() == there
