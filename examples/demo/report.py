"""report.html of the demo: verdicts, answers side by side, curves."""

import pathlib
from collections.abc import Sequence

from examples.demo.gates import HEAD, Gate
from examples.demo.questions import Question
from serve.generate import Completion
from train import report


def write(
  folder: pathlib.Path,
  questions: Sequence[Question],
  completions: Sequence[Sequence[Completion]],
  verdicts: Sequence[Gate],
) -> None:
  """Writes folder/report.html.

  Args:
    folder: of the demo; has the run folders.
    questions: those to show.
    completions: of the base, SFT and DPO model, one a question.
    verdicts: what was to be shown.
  """
  report.write(
    folder / "report.html",
    [
      report.load_run(folder / name, name=title)
      for name, title in (
        ("pretrain", "Pretraining"),
        ("sft", "SFT"),
        ("dpo", "DPO"),
      )
    ],
    title="OneMesh demo: from raw text to a tuned model",
    tables=[
      report.Table(
        title="Verdicts",
        columns=HEAD,
        rows=[gate.cells() for gate in verdicts],
        note="On held-out documents; intervals by paired bootstrap over them.",
      ),
      report.Table(
        title="Answers to held-out questions",
        columns=("question", "the docstring", "base", "SFT", "DPO"),
        rows=[
          (question.prompt, question.answer, *(c.text for c in some))
          for question, *some in zip(questions, *completions, strict=True)
        ],
        note="The likeliest that a beam search finds, at most 32 tokens.",
      ),
    ],
  )
