"""The corpus: the standard library of the interpreter that runs this.

Source code and docstrings, written by many people over thirty years: real
text, several megabytes of it, on every machine that can run the demo.
"""

import itertools
import json
import pathlib
import sysconfig
import tokenize
from collections.abc import Iterable

from data.tokenizer import Tokenizer

# Folders left out: third-party packages (they differ between machines), tests
# (some installations lack them), and tables written by programs.
_SKIPPED = {
  "site-packages",
  "dist-packages",
  "test",
  "tests",
  "idle_test",
  "encodings",
  "pydoc_data",
  "lib2to3",
  "__pycache__",
}


def source_files(limit: int | None = None) -> dict[str, str]:
  """Path within the standard library -> text, sorted by path.

  Args:
    limit: the first few files only; None: all.
  """
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  names = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
  names = (name for name in names if _SKIPPED.isdisjoint(name.parts))
  files = {}
  for name in itertools.islice(names, limit):
    with tokenize.open(root / name) as file:  # honours `# coding: latin-1`
      files[name.as_posix()] = file.read()
  return files


def check_round_trip(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
  """Raises AssertionError unless every text survives tokenisation exactly."""
  for text in texts:
    assert tokenizer.decode(tokenizer.encode(text)) == text, text[:80]


def write_jsonl(path: pathlib.Path, records: Iterable[dict]) -> None:
  """Writes one JSON object a line."""
  with open(path, "w", encoding="utf-8") as file:
    for record in records:
      file.write(json.dumps(record, ensure_ascii=False) + "\n")
