"""The split: a pure function of each document's key."""

import pytest

from data import split
from data.documents import Document

DOCUMENTS = [Document(f"d{i}", "") for i in range(4000)]


def test_nothing_lost_and_the_share_is_right():
  train, heldout, report = split.split(DOCUMENTS, fraction=0.1)
  assert sorted(d.id for d in train + heldout) == sorted(
    d.id for d in DOCUMENTS
  )
  # Binomial: 400 +- 4 standard deviations.
  assert abs(len(heldout) - 400) < 4 * (4000 * 0.1 * 0.9) ** 0.5
  assert report.removed["held out"] == [d.id for d in heldout]


def test_a_document_does_not_move_when_others_come_or_go():
  _, few, _ = split.split(DOCUMENTS[::3], fraction=0.1)
  _, many, _ = split.split(DOCUMENTS, fraction=0.1)
  assert {d.id for d in few} == {d.id for d in many} & {
    d.id for d in DOCUMENTS[::3]
  }


def test_a_larger_fraction_holds_the_smaller_and_seeds_differ():
  small, large, other = (
    {d.id for d in split.split(DOCUMENTS, fraction=f, seed=s)[1]}
    for f, s in ((0.05, 0), (0.2, 0), (0.05, 1))
  )
  assert small < large
  assert len(small & other) < len(small) / 2


def test_a_group_never_straddles():
  def group(document):
    return str(int(document.id[1:]) // 10)

  train, heldout, _ = split.split(DOCUMENTS, fraction=0.3, key=group)
  assert not {group(d) for d in train} & {group(d) for d in heldout}
  assert heldout


def test_bad_fraction():
  with pytest.raises(ValueError, match="heldout_fraction must be in"):
    split.split(DOCUMENTS, fraction=1.0)
