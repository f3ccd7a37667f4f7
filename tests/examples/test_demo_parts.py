"""The parts of the demo that need no training."""

import json
import sysconfig

import numpy as np
import pytest

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
  return questions.extract({"lib/shapes.py": SOURCE, "broken.py": "def ("})


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


def test_split_follows_the_files():
  some = questions.extract(
    {f"{i}.py": f'def f{i}():\n  """Returns number {i}."""' for i in range(6)}
  )
  train, held_out = questions.split(some, held_out_files={"1.py", "4.py"})
  assert [q.file for q in held_out] == ["1.py", "4.py"]
  assert [q.file for q in train] == ["0.py", "2.py", "3.py", "5.py"]
  line = json.loads(json.dumps(questions.conversation(held_out[0])))
  assert [m["role"] for m in line["messages"]] == ["user", "assistant"]
  assert line["messages"][1]["content"] == "Returns number 1."


@pytest.mark.parametrize("count", [2, 3, 50])
def test_pairs_prefer_and_reject_each_answer_once(count):
  some = questions.extract(
    {
      "a.py": "\n".join(
        f'def f{i}():\n  """Gives number {i:03}."""' for i in range(count)
      )
    }
  )
  pairs = questions.pairs(some, seed=1)
  assert [p["id"] for p in pairs] == [q.id for q in some]
  answers = [q.answer for q in some]
  assert [p["chosen"] for p in pairs] == answers
  assert sorted(p["rejected"] for p in pairs) == answers
  assert all(p["chosen"] != p["rejected"] for p in pairs)
  assert pairs == questions.pairs(some, seed=1)


def test_the_standard_library_is_there():
  files = corpus.source_files()
  assert {"json/decoder.py", "typing.py"} <= files.keys()
  assert not any("test" in name.split("/") for name in files)
  root = sysconfig.get_path("stdlib")
  with open(f"{root}/typing.py", encoding="utf-8") as file:
    assert files["typing.py"] == file.read()
  assert list(files) == sorted(files, key=lambda name: name.split("/"))
  assert len(corpus.source_files(limit=7)) == 7


def test_enough_is_held_out():
  # The bootstrap resamples held-out files: of them there must be dozens.
  held_out = [
    name
    for name in corpus.source_files()
    if is_heldout(name, fraction=0.125, seed=0)
  ]
  assert len(held_out) > 30


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
