"""Train and held-out documents, decided one by one from the hash of an id."""

import hashlib
from collections.abc import Callable, Iterable

from data.documents import Document
from data.report import Report


def is_heldout(key: str, *, fraction: float, seed: int = 0) -> bool:
  """Whether a key falls in the held-out part; a pure function.

  It does not depend on the other documents, so a corpus that grows never
  moves a document across the border.
  """
  digest = hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big") < fraction * 2.0**64


def split(
  documents: Iterable[Document],
  *,
  fraction: float,
  seed: int = 0,
  key: Callable[[Document], str] = lambda document: document.id,
) -> tuple[list[Document], list[Document], Report]:
  """Sets a fraction of the documents aside.

  Args:
    documents: after removal of duplicates (`data/dedup.py`), or with a `key`.
    fraction: expected share of held-out documents, in [0, 1).
    seed: another seed, another split.
    key: what is hashed. Documents of equal keys stay on one side: give the
      name of the group where documents come in groups (near duplicates,
      pairs of one source file).

  Returns:
    (train, heldout, report); the report counts the held-out as removed.
  """
  if not 0.0 <= fraction < 1.0:
    raise ValueError(
      f"heldout_fraction must be in [0, 1), got {fraction}: 0.01 sets aside"
      " one document in a hundred"
    )
  report = Report("split")
  train, heldout = [], []
  for document in documents:
    if is_heldout(key(document), fraction=fraction, seed=seed):
      heldout.append(document)
      report.remove("held out", document.id)
    else:
      train.append(document)
      report.keep()
  return train, heldout, report
