"""Exact and near duplicates.

Near duplicates are documents whose sets of word n-grams have a Jaccard
similarity of at least a threshold. MinHash (Broder, 1997) with banding
proposes pairs, the true similarity decides, so nothing is removed by a
collision. A document is removed only for one that is kept: chains of ever
less similar documents are not merged.

Results do not depend on the order of the input: of several duplicates the one
with the lowest id stays.
"""

import hashlib
import re
from collections.abc import Iterable

import numpy as np

from data.config import DedupConfig
from data.documents import Document
from data.report import Report
from data.shuffle import mix

_WORD = re.compile(r"\w+")
_BLOCK = 1 << 15  # shingles hashed at a time: two blocks stay in the L2 cache


def remove_exact(
  documents: Iterable[Document],
) -> tuple[list[Document], Report]:
  """Keeps one of the documents that are equal but for case and white space.

  Returns:
    (kept, report), kept in input order.
  """
  documents = list(documents)
  stays = {}  # hash of the text -> (lowest id, its number)
  hashes = [_text_hash(document.text) for document in documents]
  for i, (document, digest) in enumerate(zip(documents, hashes, strict=True)):
    stays[digest] = min((document.id, i), stays.get(digest, (document.id, i)))
  report = Report("exact duplicates")
  kept = []
  for i, (document, digest) in enumerate(zip(documents, hashes, strict=True)):
    if stays[digest][1] == i:
      kept.append(document)
      report.keep()
    else:
      report.remove("equal text", document.id)
  return kept, report


def remove_near(
  documents: Iterable[Document], config: DedupConfig | None = None
) -> tuple[list[Document], Report]:
  """Keeps one of the documents that are nearly equal.

  Documents are taken in order of id; one is removed if its similarity to a
  document already kept reaches the threshold.

  Returns:
    (kept, report), kept in input order.
  """
  config = config or DedupConfig()
  documents = list(documents)
  report = Report("near duplicates")
  sets = shingle_sets([d.text for d in documents], config.ngram)
  num_hashes = config.bands * config.rows
  bands = band_keys(
    signatures(sets, num_hashes, config.seed), config.bands, config.rows
  )
  buckets = [{} for _ in range(config.bands)]  # key -> documents kept
  by_id = sorted(range(len(documents)), key=lambda i: documents[i].id)
  removed = set()
  compared = 0
  for i in by_id:
    keys = bands[i].tolist()
    candidates = {
      j
      for bucket, key in zip(buckets, keys, strict=True)
      for j in bucket.get(key, ())
    }
    for j in sorted(candidates):
      compared += 1
      if jaccard(sets[i], sets[j]) >= config.threshold:
        removed.add(i)
        break
    else:
      for bucket, key in zip(buckets, keys, strict=True):
        bucket.setdefault(key, []).append(i)
  kept = []
  for i, document in enumerate(documents):
    if i in removed:
      report.remove(f"similarity >= {config.threshold}", document.id)
    else:
      kept.append(document)
      report.keep()
  report.note("pairs compared", compared)
  return kept, report


def shingle_sets(texts: list[str], ngram: int) -> list[np.ndarray]:
  """The set of word n-grams of each text, as sorted uint64 hashes.

  A text of fewer words is one shingle, all of it: an empty set would make
  all short texts equal.
  """
  numbers = _WordNumbers()
  numbered = []
  for text in texts:
    words = _WORD.findall(text.lower()) or [text]
    numbered.append(
      np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))
    )
  hashes = np.frombuffer(
    b"".join(
      hashlib.blake2b(word.encode(), digest_size=8).digest() for word in numbers
    ),
    "<u8",
  )
  sets = []
  for words in numbered:
    n = min(ngram, len(words))
    shingles = np.zeros(len(words) - n + 1, np.uint64)
    for k in range(n):  # a polynomial in an odd number, then scattered
      shingles *= np.uint64(0x9E3779B97F4A7C15)
      shingles += hashes[words[k : k + len(shingles)]]
    sets.append(np.unique(mix(shingles + np.uint64(n))))
  return sets


class _WordNumbers(dict):
  """word -> its number, given when it is first seen."""

  def __missing__(self, word: str) -> int:
    number = self[word] = len(self)
    return number


def signatures(
  sets: list[np.ndarray], num_hashes: int, seed: int = 0
) -> np.ndarray:
  """MinHash signatures: the least value of each hash function over each set.

  The functions are x -> (a x + b) mod 2^64 with odd a, of which the upper 32
  bits are kept (multiply-shift, Dietzfelbinger et al., 1997); they need no
  modulus by a prime, whose products overflow 64 bits.

  Returns:
    uint32 [sets, num_hashes].
  """
  parameters = mix(
    np.arange(2 * num_hashes, dtype=np.uint64) + mix(np.uint64(seed))
  )
  a, b = parameters[::2] | np.uint64(1), parameters[1::2]
  out = np.empty((len(sets), num_hashes), np.uint32)
  start = 0
  while start < len(sets):
    stop, size = start, 0
    while stop < len(sets) and (stop == start or size < _BLOCK):
      size += len(sets[stop])
      stop += 1
    block = np.concatenate(sets[start:stop])
    begins = np.cumsum([0] + [len(s) for s in sets[start : stop - 1]])
    hashed = np.empty_like(block)
    for k in range(num_hashes):
      np.multiply(block, a[k], out=hashed)
      hashed += b[k]
      least = np.minimum.reduceat(hashed, begins)
      out[start:stop, k] = least >> np.uint64(32)
    start = stop
  return out


def band_keys(signature: np.ndarray, bands: int, rows: int) -> np.ndarray:
  """One key a band; equal keys make two documents candidates.

  Two documents of similarity J meet in a band with probability J^rows, in
  any with 1 - (1 - J^rows)^bands (Leskovec et al., "Mining of Massive
  Datasets", section 3.4).

  Args:
    signature: uint32 [N, bands x rows].

  Returns:
    uint64 [N, bands].
  """
  cells = signature.reshape(len(signature), bands, rows).astype(np.uint64)
  keys = np.zeros(cells.shape[:2], np.uint64)
  for r in range(rows):
    keys = mix(keys * np.uint64(3) + cells[..., r] + np.uint64(1))
  return keys


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
  """|a and b| / |a or b| of two sorted sets without repetitions."""
  both = len(np.intersect1d(a, b, assume_unique=True))
  return both / (len(a) + len(b) - both)


def _text_hash(text: str) -> bytes:
  plain = " ".join(text.casefold().split())
  return hashlib.blake2b(plain.encode(), digest_size=16).digest()
