"""The layout in README.md shows every room, and none that is gone."""

import pathlib

_ROOT = pathlib.Path(__file__).parents[1]


def test_the_layout_is_that_of_the_code():
  layout = (_ROOT / "README.md").read_text(encoding="utf-8").split("```")[1]
  shown = {
    line.split()[0].rstrip("/")
    for line in layout.splitlines()
    if line[:1].isalpha()
  }
  rooms = {
    path.name for path in _ROOT.glob("[a-z]*") if any(path.rglob("*.py"))
  }
  assert shown == rooms
