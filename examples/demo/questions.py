"""Questions with answers: what does the function of this signature do?

Python's `ast` reads signatures and docstrings from the corpus. The answer is
the docstring's first paragraph on one line. Questions whose answer occurs
twice are left out: nobody can tell them apart, and no answer is then both in
the training and in the held-out part.
"""

import ast
import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from data.documents import Document

_MAX_CHARS = 200  # of a question and of an answer


@dataclasses.dataclass(frozen=True)
class Question:
  """One function.

  Attributes:
    file: path of the source file, the document of the corpus it is from.
    name: qualified name of the function; `file:name:line` is unique.
    line: of its `def`.
    prompt: module, class and signature.
    answer: first paragraph of its docstring.
  """

  file: str
  name: str
  line: int
  prompt: str
  answer: str

  @property
  def id(self) -> str:
    return f"{self.file}:{self.name}:{self.line}"

  @property
  def messages(self) -> list[dict]:
    """The conversation up to the answer."""
    return [{"role": "user", "content": self.prompt}]


def extract(documents: Iterable[Document]) -> list[Question]:
  """The questions of source files.

  Those that this interpreter cannot parse are passed over.
  """
  questions = []
  for document in documents:
    try:
      tree = ast.parse(document.text)
    except SyntaxError:
      continue
    questions.extend(_functions(tree, document.id, ()))
  return questions


def unique(*parts: Sequence[Question]) -> list[list[Question]]:
  """The same parts without the questions whose answer occurs twice in all."""
  times = collections.Counter(q.answer for part in parts for q in part)
  return [[q for q in part if times[q.answer] == 1] for part in parts]


def _functions(node: ast.AST, file: str, outer: tuple) -> Iterator[Question]:
  """Questions of the functions below a node, methods and nested ones too."""
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
      first, _, _ = (ast.get_docstring(child) or "").partition("\n\n")
      answer = " ".join(first.split())
      head = [f"class {name}:" for name in outer]
      prompt = "\n".join(
        [f"# {file}", *head, f"def {child.name}({ast.unparse(child.args)}):"]
      )
      if 10 <= len(answer) <= _MAX_CHARS and len(prompt) <= _MAX_CHARS:
        name = ".".join([*outer, child.name])
        yield Question(file, name, child.lineno, prompt, answer)
    inner = (*outer, child.name) if isinstance(child, ast.ClassDef) else outer
    yield from _functions(child, file, inner)


def conversation(question: Question) -> dict:
  """A line of a "chat" source."""
  answer = {"role": "assistant", "content": question.answer}
  return {"id": question.id, "messages": [*question.messages, answer]}


def pairs(questions: Sequence[Question], *, seed: int) -> list[dict]:
  """Lines of `align.config.PairsConfig`: each answer against another's.

  Every answer is preferred once and rejected once, so how good a docstring
  looks by itself says nothing about which of a pair is right.

  Args:
    questions: at least two.
    seed: of who is paired with whom.
  """
  order = np.random.default_rng(seed).permutation(len(questions))
  other = dict(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True))
  return [
    {
      "id": question.id,
      "prompt": question.messages,
      "chosen": question.answer,
      "rejected": questions[other[i]].answer,
    }
    for i, question in enumerate(questions)
  ]
