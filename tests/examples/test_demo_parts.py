"""The parts of the demo that need no training."""

import json
import sysconfig

import numpy as np
import pytest

from data import documents as documents_lib
from data.config import Source
from data.documents import Document
from data.split import is_heldout
from examples.demo import corpus, gates, questions
from examples.demo.__main__ import _fresh

SOURCE = '''
"""A module."""

def plain(a, b=1, *args, key: int = 2, **rest) -> int:
  """Adds numbers,
  all of them.

  And returns the sum.
  """

class Shape:
  """Not a function."""

  class Corner:
    async def move(self, by):
      """Moves the corner by a step."""
      def inner(x):
        """Helps to move it around."""

  def silent(self):
    pass

  def short(self):
    """Tiny."""

  def same(self):
    """Said by two functions."""

def same_again():
  """Said by two functions."""
'''


@pytest.fixture(scope="module")
def found():
  documents = [Document("lib/shapes.py", SOURCE), Document("a.py", "def (")]
  return questions.unique(questions.extract(documents))[0]


def test_prompts_and_answers(found):
  assert [(q.prompt, q.answer) for q in found] == [
    (
      "# lib/shapes.py\ndef plain(a, b=1, *args, key: int=2, **rest):",
      "Adds numbers, all of them.",
    ),
    (
      "# lib/shapes.py\nclass Shape:\nclass Corner:\ndef move(self, by):",
      "Moves the corner by a step.",
    ),
    (
      "# lib/shapes.py\nclass Shape:\nclass Corner:\ndef inner(x):",
      "Helps to move it around.",
    ),
  ]
  assert [q.name for q in found] == [
    "plain",
    "Shape.Corner.move",
    "Shape.Corner.inner",
  ]


def functions(file, numbers):
  """Questions whose answers are these numbers."""
  code = [f'def f{n}():\n  """Gives number {n:03}."""' for n in numbers]
  return questions.extract([Document(file, "\n".join(code))])


def test_no_answer_is_on_both_sides():
  train, held_out = questions.unique(
    functions("a.py", [1, 2, 3, 3]), functions("b.py", [2, 4])
  )
  assert [q.answer for q in train] == ["Gives number 001."]
  assert [q.answer for q in held_out] == ["Gives number 004."]


def test_conversation():
  line = json.loads(json.dumps(questions.conversation(*functions("a.py", [1]))))
  assert [m["role"] for m in line["messages"]] == ["user", "assistant"]
  assert line["messages"][1]["content"] == "Gives number 001."


@pytest.mark.parametrize("count", [2, 3, 50])
def test_pairs_prefer_and_reject_each_answer_once(count):
  some = functions("a.py", range(count))
  pairs = questions.pairs(some, seed=1)
  assert [p["id"] for p in pairs] == [q.id for q in some]
  answers = [q.answer for q in some]
  assert [p["chosen"] for p in pairs] == answers
  assert sorted(p["rejected"] for p in pairs) == answers
  assert all(p["chosen"] != p["rejected"] for p in pairs)
  assert pairs == questions.pairs(some, seed=1)


def test_the_standard_library_is_there():
  documents = list(corpus.source_files())
  ids = [d.id for d in documents]
  assert {"json/decoder.py", "typing.py"} <= set(ids)
  assert not any("test" in name.split("/") for name in ids)
  assert ids == sorted(ids, key=lambda name: name.split("/"))
  root = sysconfig.get_path("stdlib")
  with open(f"{root}/typing.py", encoding="utf-8") as file:
    assert documents[ids.index("typing.py")].text == file.read()
  assert list(corpus.source_files(limit=7)) == documents[:7]
  # The bootstrap resamples held-out documents: there must be dozens.
  held_out = [i for i in ids if is_heldout(i, fraction=0.1, seed=0)]
  assert len(held_out) > 30


def test_sample_fits():
  documents = [Document(str(i), "x" * n) for i, n in enumerate([50] * 20)]
  chosen = corpus.sample(documents, max_chars=520, seed=0)
  assert len(chosen) == len({d.id for d in chosen}) == 10
  assert chosen == corpus.sample(documents, max_chars=520, seed=0)
  assert chosen != corpus.sample(documents, max_chars=520, seed=1)


def test_documents_come_back(tmp_path):
  documents = [Document("a/b.py", "é\n\t\u2028x"), Document("c.py", "y")]
  corpus.write_documents(tmp_path / "d.jsonl", documents)
  source = Source(path=str(tmp_path / "d.jsonl"))
  assert list(documents_lib.read(source)) == documents


def one_gate(baseline, ours, **changes):
  values = {
    "weight": np.ones(40),
    "groups": [str(i // 2) for i in range(40)],
    "lower_is_better": True,
  }
  return gates.better("claim", baseline, ours, **values | changes)


def test_gate_passes_a_real_improvement():
  hard = np.random.default_rng(0).gamma(2.0, size=40)
  gate = one_gate(hard, 0.9 * hard - 0.01)
  assert gate.passed
  np.testing.assert_allclose(gate.baseline, hard.mean())
  np.testing.assert_allclose(
    gate.improvement.estimate, gate.baseline - gate.system
  )


@pytest.mark.parametrize("lower_is_better", [True, False])
def test_gate_fails_on_no_improvement_and_on_harm(lower_is_better):
  rng = np.random.default_rng(1)
  hard = rng.gamma(2.0, size=40)
  settings = {"lower_is_better": lower_is_better}
  assert not one_gate(hard, hard, **settings).passed
  assert not one_gate(hard, rng.permutation(hard), **settings).passed
  worse = hard + 1 if lower_is_better else hard - 1
  assert not one_gate(hard, worse, **settings).passed
  assert one_gate(worse, hard, **settings).passed


def test_gate_resamples_groups():
  # One file of forty answers improves: with it alone nothing is known.
  baseline, ours = np.zeros(44), np.r_[np.ones(40), -np.ones(4)]
  weight, groups = np.ones(44), ["big"] * 40 + ["a", "b", "c", "d"]
  settings = {"weight": weight, "lower_is_better": False}
  assert not one_gate(baseline, ours, groups=groups, **settings).passed
  apart = [str(i) for i in range(44)]
  assert one_gate(baseline, ours, groups=apart, **settings).passed


def test_bound_and_table():
  low, high = gates.at_least("a", 0.9, 0.89), gates.at_least("b", 0.9, 0.9)
  assert not low.passed and high.passed
  text = gates.table([low, high]).splitlines()
  assert len(text) == 3 and "FAIL" in text[1] and "pass" in text[2]


def test_replaces_only_its_own_folder(tmp_path):
  folder = _fresh(str(tmp_path / "runs" / "demo"))
  (folder / "old").touch()
  assert not (_fresh(str(folder)) / "old").exists()
  (tmp_path / "theses.tex").touch()
  with pytest.raises(ValueError, match="not empty"):
    _fresh(str(tmp_path))
  assert (tmp_path / "theses.tex").exists()
