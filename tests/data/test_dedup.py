"""Duplicates against brute force over all pairs, and against datasketch."""

import itertools

import numpy as np
import pytest

from data import dedup
from data.config import DedupConfig
from data.documents import Document


def corpus(seed=0, originals=40, words=120):
  """Documents and copies of them with more and more words replaced."""
  rng = np.random.default_rng(seed)
  documents = []
  for i in range(originals):
    text = [f"w{n}" for n in rng.integers(0, 500, words)]
    documents.append(Document(f"{i:03d}-0", " ".join(text)))
    for copy in range(1, 5):
      text = list(text)
      for place in rng.integers(0, words, copy):
        text[place] = f"v{rng.integers(500)}"
      documents.append(Document(f"{i:03d}-{copy}", " ".join(text)))
  return [documents[i] for i in rng.permutation(len(documents))]


def true_jaccard(a: str, b: str, n: int) -> float:
  """From the definition, on strings."""
  sets = []
  for text in (a, b):
    words = text.lower().split()
    n_text = min(n, len(words))
    sets.append(
      {tuple(words[i : i + n_text]) for i in range(len(words) - n_text + 1)}
    )
  return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def brute_force(documents, config):
  """Ids kept: in order of id, what is near no document kept before."""
  kept = []
  for document in sorted(documents, key=lambda d: d.id):
    if all(
      true_jaccard(document.text, k.text, config.ngram) < config.threshold
      for k in kept
    ):
      kept.append(document)
  return {d.id for d in kept}


def test_near_duplicates_are_those_of_brute_force():
  documents = corpus()
  # 60 bands of 3 miss a pair of similarity 0.7 once in 10^11.
  config = DedupConfig(threshold=0.7, bands=60, rows=3)
  kept, report = dedup.remove_near(documents, config)
  assert {d.id for d in kept} == brute_force(documents, config)
  assert 40 <= len(kept) < 160  # both happen: near and not so near copies
  assert report.kept == len(kept)
  assert report.num_removed == len(documents) - len(kept)


def test_order_of_input_does_not_matter():
  documents = corpus()
  kept, _ = dedup.remove_near(documents)
  turned, _ = dedup.remove_near(documents[::-1])
  assert {d.id for d in kept} == {d.id for d in turned}
  assert [d.id for d in kept] == [d.id for d in turned][::-1]


def test_jaccard_is_exact():
  documents = corpus(originals=6)
  sets = dedup.shingle_sets([d.text for d in documents], 3)
  for i, j in itertools.combinations(range(len(documents)), 2):
    assert dedup.jaccard(sets[i], sets[j]) == true_jaccard(
      documents[i].text, documents[j].text, 3
    )


def test_minhash_estimates_without_bias():
  # Binomial: the mean over 200 pairs of 256 hashes is within 4 deviations.
  rng = np.random.default_rng(1)
  for true in (0.2, 0.5, 0.9):
    both = round(300 * true)
    errors = []
    for trial in range(200):
      union = rng.integers(0, 2**63, 300).astype(np.uint64)
      half = both + (300 - both) // 2
      a = np.sort(union[:half])
      b = np.sort(np.concatenate([union[:both], union[half:]]))
      s = dedup.signatures([a, b], 256, seed=trial)
      errors.append((s[0] == s[1]).mean() - both / 300)
    deviation = (true * (1 - true) / 256 / 200) ** 0.5
    assert abs(np.mean(errors)) < 4 * deviation


def test_signatures_do_not_depend_on_neighbours():
  sets = dedup.shingle_sets([d.text for d in corpus(originals=8)], 5)
  together = dedup.signatures(sets, 20)
  alone = np.concatenate([dedup.signatures([s], 20) for s in sets])
  np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("bands, rows", [(14, 8), (20, 5)])
def test_candidates_follow_the_banding_curve(bands, rows):
  # P = 1 - (1 - J^rows)^bands: bands and rows swapped would be far off.
  rng = np.random.default_rng(2)
  for similarity in (0.5, 0.7, 0.85):
    first = rng.integers(0, 2**32, (4000, bands * rows)).astype(np.uint32)
    equal = rng.random(first.shape) < similarity
    second = np.where(equal, first, first + np.uint32(1))
    first, second = (dedup.band_keys(s, bands, rows) for s in (first, second))
    meet = (first == second).any(1).mean()
    wanted = 1 - (1 - similarity**rows) ** bands
    assert abs(meet - wanted) < 4 * (wanted * (1 - wanted) / 4000) ** 0.5 + 1e-3


def test_short_texts_are_not_all_equal():
  documents = [Document(t, t) for t in ("a", "b", "a b", "!", "?!")]
  assert dedup.remove_near(documents)[0] == documents


def test_exact_keeps_the_lowest_id():
  documents = [
    Document("b", "Some text\n here"),
    Document("a", "some  TEXT here"),
    Document("c", "some text there"),
    Document("d", "some text here"),
  ]
  kept, report = dedup.remove_exact(documents)
  assert [d.id for d in kept] == ["a", "c"]
  assert report.removed == {"equal text": ["b", "d"]}


@pytest.mark.oracle
def test_datasketch_finds_the_same_pairs():
  datasketch = pytest.importorskip("datasketch")
  documents = corpus(seed=3)
  lsh = datasketch.MinHashLSH(num_perm=100, params=(50, 2))
  kept = {}
  for document in sorted(documents, key=lambda d: d.id):
    words = document.text.split()
    minhash = datasketch.MinHash(num_perm=100)
    for i in range(len(words) - 4):
      minhash.update(" ".join(words[i : i + 5]).encode())
    near = [
      k
      for k in lsh.query(minhash)
      if true_jaccard(document.text, kept[k], 5) >= 0.7
    ]
    if not near:
      lsh.insert(document.id, minhash)
      kept[document.id] = document.text
  config = DedupConfig(threshold=0.7, bands=50, rows=2)
  ours, _ = dedup.remove_near(documents, config)
  assert {d.id for d in ours} == set(kept)
