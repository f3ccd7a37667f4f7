"""Token stores: tokenised documents on disk, written once, memory-mapped.

A store is a folder:

    tokens.bin        uint16 or uint32 ids of all documents, end to end
    token_offsets.bin int64 [N + 1]: document i is tokens[o[i] : o[i + 1]]
    ids.bin           UTF-8 document ids, end to end
    id_offsets.bin    int64 [N + 1]
    num_bytes.bin     int64 [N]: bytes of UTF-8 of each document's text
    mask.bin          uint8 per token, if there is one: 1 = learn to predict it
    meta.json         counts, dtype, vocabulary and tokenizer fingerprint

Integers are little-endian.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Example:
  """A tokenised document.

  Attributes:
    id: of the document.
    tokens: ids, with BOS and EOS where they are wanted.
    mask: for each token whether it is to be predicted; None: all are.
    num_bytes: UTF-8 bytes of its text, for bits per byte; 0: not known.
  """

  id: str
  tokens: Sequence[int]
  mask: Sequence[bool] | None = None
  num_bytes: int = 0


class Tokenized(Protocol):
  """What the loader reads: a store on disk, or `InMemory`.

  Attributes:
    tokens: ids of all documents end to end [num_tokens].
    offsets: int64 [N + 1].
    mask: uint8 [num_tokens] or None.
    num_bytes: int64 [N].
  """

  tokens: np.ndarray
  offsets: np.ndarray
  mask: np.ndarray | None
  num_bytes: np.ndarray

  def __len__(self) -> int: ...
  def id(self, document: int) -> str: ...


class InMemory:
  """Examples held as arrays, for tests, notebooks and small sets."""

  def __init__(self, examples: Iterable[Example]):
    examples = list(examples)
    for example in examples:
      _check(example, vocab_size=2**31)
    self._ids = [e.id for e in examples]
    self.offsets = _offsets([len(e.tokens) for e in examples])
    self.tokens = np.array(
      [t for e in examples for t in e.tokens], dtype=np.uint32
    )
    self.num_bytes = np.array([e.num_bytes for e in examples], np.int64)
    self.mask = None
    if any(e.mask is not None for e in examples):
      self.mask = np.concatenate([_mask(e) for e in examples])

  def __len__(self) -> int:
    return len(self._ids)

  def id(self, document: int) -> str:
    return self._ids[document]


class TokenStore:
  """A store on disk, see the head of this file.

  Args:
    path: folder that `write` made.

  Raises:
    ValueError: no store there, or its files have the wrong sizes.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = Path(path)
    if not (self.path / "meta.json").is_file():
      raise ValueError(
        f"{str(path)!r} is not a token store (no meta.json in it);"
        " python -m data.prepare writes one"
      )
    self.meta = json.loads((self.path / "meta.json").read_text())
    if self.meta["version"] != _VERSION:
      raise ValueError(
        f"{str(path)!r} has store version {self.meta['version']}, this code"
        f" reads {_VERSION}: run data.prepare again"
      )
    n, total = self.meta["num_documents"], self.meta["num_tokens"]
    self.vocab_size = self.meta["vocab_size"]
    self.fingerprint = self.meta["fingerprint"]
    self.tokens = self._map("tokens.bin", self.meta["dtype"], total)
    self.offsets = self._map("token_offsets.bin", "<i8", n + 1)
    self.num_bytes = self._map("num_bytes.bin", "<i8", n)
    self._id_offsets = self._map("id_offsets.bin", "<i8", n + 1)
    self._ids = self._map("ids.bin", "u1", int(self._id_offsets[-1]))
    self.mask = None
    if self.meta["has_mask"]:
      self.mask = self._map("mask.bin", "u1", total)

  def __len__(self) -> int:
    return self.meta["num_documents"]

  def id(self, document: int) -> str:
    start, stop = self._id_offsets[document : document + 2]
    return bytes(self._ids[start:stop]).decode()

  def _map(self, name: str, dtype: str, size: int) -> np.ndarray:
    path = self.path / name
    wanted = size * np.dtype(dtype).itemsize
    got = path.stat().st_size if path.is_file() else "no file"
    if got != wanted:
      raise ValueError(
        f"{path} should have {wanted} bytes and has {got}: the store is"
        " damaged; delete the folder and run data.prepare again"
      )
    if size == 0:  # mmap refuses empty files
      return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r", shape=(size,))


def write(
  path: str | os.PathLike,
  examples: Iterable[Example],
  *,
  vocab_size: int,
  fingerprint: str,
) -> TokenStore:
  """Writes a store; the folder appears whole or not at all.

  Args:
    path: the folder to make.
    examples: streamed, never all in memory.
    vocab_size: ids are below it; up to 65,536 they take two bytes each.
    fingerprint: of the tokenizer, compared when a run opens the store.

  Raises:
    ValueError: the folder exists, an id is outside the vocabulary, a mask
      has another length than its tokens, or there is no example.
  """
  path = Path(path)
  if path.exists():
    raise ValueError(
      f"{str(path)!r} exists and a store is written once: delete it or choose"
      " another folder"
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
  partial.mkdir()
  try:
    _write_files(partial, examples, vocab_size, fingerprint)
    os.rename(partial, path)
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return TokenStore(path)


def _write_files(folder, examples, vocab_size, fingerprint) -> None:
  dtype = "<u2" if vocab_size <= 2**16 else "<u4"
  lengths, id_lengths, num_bytes, has_mask = [], [], [], False
  with (
    open(folder / "tokens.bin", "wb") as tokens,
    open(folder / "mask.bin", "wb") as mask,
    open(folder / "ids.bin", "wb") as ids,
  ):
    for example in examples:
      _check(example, vocab_size)
      identity = example.id.encode()
      tokens.write(np.asarray(example.tokens, dtype).tobytes())
      mask.write(_mask(example).tobytes())
      ids.write(identity)
      lengths.append(len(example.tokens))
      id_lengths.append(len(identity))
      num_bytes.append(example.num_bytes)
      has_mask = has_mask or example.mask is not None
  if not lengths:
    raise ValueError(f"no document to write to {str(folder.parent)!r}")
  if not has_mask:
    os.remove(folder / "mask.bin")
  _offsets(lengths).astype("<i8").tofile(folder / "token_offsets.bin")
  _offsets(id_lengths).astype("<i8").tofile(folder / "id_offsets.bin")
  np.asarray(num_bytes, "<i8").tofile(folder / "num_bytes.bin")
  meta = {
    "version": _VERSION,
    "num_documents": len(lengths),
    "num_tokens": int(sum(lengths)),
    "num_bytes": int(sum(num_bytes)),
    "dtype": dtype,
    "vocab_size": vocab_size,
    "fingerprint": fingerprint,
    "has_mask": has_mask,
  }
  (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
  for name in os.listdir(folder):  # on disk before the folder gets its name
    with open(folder / name, "rb") as file:
      os.fsync(file.fileno())


def _check(example: Example, vocab_size: int) -> None:
  tokens = np.asarray(example.tokens, np.int64)
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
    raise ValueError(
      f"document {example.id!r} has token ids {tokens.min()}..{tokens.max()}"
      f" outside the vocabulary of {vocab_size}"
    )
  if example.mask is not None and len(example.mask) != tokens.size:
    raise ValueError(
      f"document {example.id!r} has {tokens.size} tokens but a mask of"
      f" {len(example.mask)}"
    )


def _mask(example: Example) -> np.ndarray:
  if example.mask is None:
    return np.ones(len(example.tokens), np.uint8)
  return np.asarray(example.mask, bool).astype(np.uint8)


def _offsets(lengths: Sequence[int]) -> np.ndarray:
  return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(
    np.int64
  )
