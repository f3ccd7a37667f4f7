"""The corpus: the standard library of the interpreter that runs this.

Source code and docstrings, written by many people over thirty years: real
text, several megabytes of it, on every machine that can run the demo.
"""

import itertools
import json
import pathlib
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from data.documents import Document
from data.tokenizer import Tokenizer

# Folders left out: third-party packages, which differ between machines; tests,
# which some installations lack; and a copy of the manual.
_SKIPPED = {
  "site-packages",
  "dist-packages",
  "test",
  "tests",
  "idle_test",
  "pydoc_data",
  "__pycache__",
}


def source_files(limit: int | None = None) -> Iterator[Document]:
  """Yields the files, sorted by path; ids are paths in the standard library.

  Args:
    limit: the first few files only; None: all.
  """
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  names = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
  names = (name for name in names if _SKIPPED.isdisjoint(name.parts))
  for name in itertools.islice(names, limit):
    with tokenize.open(root / name) as file:  # honours `# coding: latin-1`
      yield Document(name.as_posix(), file.read())


def write_documents(path: pathlib.Path, documents: Iterable[Document]) -> None:
  """Writes JSONL that `data.documents` reads back."""
  write_jsonl(path, ({"id": d.id, "text": d.text} for d in documents))


def write_jsonl(path: pathlib.Path, records: Iterable[dict]) -> None:
  """Writes one JSON object a line."""
  with open(path, "w", encoding="utf-8") as file:
    for record in records:
      file.write(json.dumps(record, ensure_ascii=False) + "\n")


def sample(
  documents: Sequence[Document], *, max_chars: int, seed: int
) -> list[Document]:
  """Random documents, as many as fit.

  Args:
    documents: to choose from.
    max_chars: of the chosen ones together.
    seed: of the choice.
  """
  chosen, room = [], max_chars
  for i in np.random.default_rng(seed).permutation(len(documents)):
    room -= len(documents[i].text)
    if room < 0:
      break
    chosen.append(documents[i])
  return chosen


def check_round_trip(tokenizer: Tokenizer, documents: list[Document]) -> None:
  """Raises AssertionError unless every text survives tokenisation exactly."""
  for document in documents:
    text = tokenizer.decode(tokenizer.encode(document.text))
    assert text == document.text, f"{document.id} does not round-trip"
  print(f"{len(documents)} held-out documents round-trip exactly")
