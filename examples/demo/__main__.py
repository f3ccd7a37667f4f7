"""Raw text in, a tuned model that answers out, in minutes on two CPU cores.

  python -m examples.demo --workdir=runs/demo

Exits with 1 unless every stage improves on its baseline beyond chance. The
curves, the answers and the verdicts are in WORKDIR/report.html.
"""

import argparse
import contextlib
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence

from examples.demo import configs
from examples.demo.configs import Sizes

_SHOWN = 5  # held-out questions in the report
_NEGATIVES = 4  # wrong answers to each held-out question
_MARK = ".demo"  # A folder with this file in it may be replaced.


def run(workdir: str, sizes: Sizes) -> Sequence:
  """The whole path.

  Args:
    workdir: where everything goes; the folder of an earlier demo is replaced.
    sizes: time against quality.

  Returns:
    The verdicts, a list of `examples.demo.gates.Gate`.

  Raises:
    ValueError: the folder holds something else.
  """
  # ---- Imports: `--help` must not wait for JAX ----
  import numpy as np

  from align import dpo
  from align.preference import wins
  from data import prepare
  from data.chat import DEFAULT_TEMPLATE, ChatTemplate
  from evals.chrf import sentence_chrf
  from examples.demo import corpus, evaluate, gates, questions, report
  from sharding.mesh import make_mesh
  from train import assembly, pretrain, sft

  folder = _fresh(workdir)

  with _stage("Corpus: the standard library of this interpreter"):
    corpus.write_documents(
      folder / "all.jsonl", corpus.source_files(sizes.max_files)
    )
    documents, held_out_documents, reports = prepare.select(
      configs.corpus(folder / "all.jsonl", sizes)
    )
    print(*reports, sep="\n")

  with _stage("Tokenizer, and as much text as there is time for"):
    sample = corpus.sample(
      documents, max_chars=sizes.corpus_chars, seed=sizes.seed
    )
    corpus.write_documents(
      folder / "corpus.jsonl", [*sample, *held_out_documents]
    )
    prepared = prepare.run(
      configs.corpus(folder / "corpus.jsonl", sizes), folder / "corpus"
    )
    tokenizer = prepared.tokenizer
    for store in (prepared.train, prepared.heldout):
      print(
        f"{store.path.name}: {len(store)} documents,"
        f" {len(store.tokens):,} tokens"
      )
    corpus.check_round_trip(tokenizer, held_out_documents)

  with _stage("Questions: signature -> docstring"):
    train, held_out = questions.unique(
      questions.extract(documents), questions.extract(held_out_documents)
    )
    print(f"{len(train):,} to train on, {len(held_out):,} held out")
    corpus.write_jsonl(
      folder / "questions.jsonl",
      (questions.conversation(q) for q in train),
    )
    prepared = prepare.run(
      configs.conversations(folder, sizes), folder / "conversations"
    )
    print(*prepared.reports, sep="\n")
    for name, some in (("pairs", train), ("held_out_pairs", held_out)):
      pairs = questions.pairs(some, seed=sizes.seed)
      corpus.write_jsonl(folder / f"{name}.jsonl", pairs)

  with _stage("Pretraining"):
    config = configs.pretrain(folder, sizes)
    base = pretrain.run(config, folder / "pretrain").state.model

  with _stage("SFT: answers to questions"):
    tuned = sft.run(configs.sft(folder, sizes), folder / "sft").state.model

  with _stage("DPO: the right answer against another question's"):
    preferring = dpo.run(configs.dpo(folder, sizes), folder / "dpo").state.model

  mesh = make_mesh(config.mesh)
  execution = assembly.make_execution(config.step, mesh, config.rules)
  scoring = {"seq_len": sizes.seq_len, "execution": execution}
  template = ChatTemplate(DEFAULT_TEMPLATE)
  verdicts = []

  with _stage("Held-out text: the decoder against a 3-gram model"):
    texts = evaluate.held_out_texts(config)
    scores = evaluate.score(base, texts, **scoring)
    print(f"perplexity {scores.perplexity:.2f}")
    verdicts.append(
      gates.better(
        "bits per byte: decoder < 3-gram of the same tokens",
        evaluate.ngram_nats(config, texts) / np.log(2),
        scores.nats / np.log(2),
        scores.bytes,
        groups=[text.id for text in texts],
        lower_is_better=True,
      )
    )

  with _stage("Held-out questions: base, SFT, DPO"):
    sources = [q.file for q in held_out]
    right = evaluate.answer_examples(
      held_out, [q.answer for q in held_out], tokenizer, template
    )
    # One wrong answer a question is a coin toss; several tell more.
    wrong = [
      evaluate.answer_examples(
        held_out,
        [p["rejected"] for p in questions.pairs(held_out, seed=seed)],
        tokenizer,
        template,
      )
      for seed in range(sizes.seed, sizes.seed + _NEGATIVES)
    ]
    right_scores = [
      evaluate.score(m, right, **scoring) for m in (base, tuned, preferring)
    ]
    wrong_scores = [
      [evaluate.score(m, some, **scoring) for m in (tuned, preferring)]
      for some in wrong
    ]
    ask = lambda model, some: evaluate.answer(
      model, some, tokenizer, template, execution
    )
    answers = [ask(model, held_out) for model in (base, tuned)]
    chrf = [
      sentence_chrf([c.text for c in some], [q.answer for q in held_out])
      for some in answers
    ]
    ones = np.ones(len(held_out))
    # The SFT model ranks a pair by log-probability a token; the DPO model by
    # its implicit reward, which the SFT model is the origin of.
    by_length = lambda of: -of.nats / of.tokens
    reward = lambda sft, dpo: sft.nats - dpo.nats
    sft_wins = np.mean(
      [
        wins(by_length(right_scores[1]) - by_length(s[0])) for s in wrong_scores
      ],
      axis=0,
    )
    dpo_wins = np.mean(
      [wins(reward(*right_scores[1:]) - reward(*s)) for s in wrong_scores],
      axis=0,
    )
    stopped = [c.finish_reason == "stop" for c in answers[1]]
    verdicts += [
      gates.better(
        "nats per answer token: SFT < base",
        right_scores[0].nats,
        right_scores[1].nats,
        right_scores[0].tokens,
        groups=sources,
        lower_is_better=True,
      ),
      gates.better(
        "chrF of answers: SFT > base",
        *chrf,
        ones,
        groups=sources,
        lower_is_better=False,
      ),
      gates.better(
        "preference accuracy: DPO > SFT by log-probability a token",
        sft_wins,
        dpo_wins,
        ones,
        groups=sources,
        lower_is_better=False,
      ),
      gates.at_least(
        "SFT answers that end with the stop token", 0.9, np.mean(stopped)
      ),
    ]

    step = max(1, len(held_out) // _SHOWN)
    shown = slice(0, _SHOWN * step, step)
    questions_shown = held_out[shown]
    completions = [
      *(some[shown] for some in answers),
      ask(preferring, questions_shown),
    ]

  report.write(folder, questions_shown, completions, verdicts)
  return verdicts


def main() -> None:
  """Parses the command line, makes devices, runs, judges."""
  parser = argparse.ArgumentParser(
    prog="python -m examples.demo", description=__doc__.partition("\n")[0]
  )
  parser.add_argument("--workdir", default="runs/demo", help="output folder")
  parser.add_argument("--seed", type=int, default=0, help="of everything")
  args = parser.parse_args()

  import jax

  # Where there is no accelerator, two devices are emulated: the program is
  # the one that runs on many chips.
  jax.config.update("jax_num_cpu_devices", 2)
  start = time.perf_counter()
  verdicts = run(args.workdir, Sizes(seed=args.seed))

  from examples.demo import gates

  print(f"\n{gates.table(verdicts)}\n")
  print(f"{time.perf_counter() - start:.0f} s; {args.workdir}/report.html")
  failed = [gate.claim for gate in verdicts if not gate.passed]
  if failed:
    sys.exit("The demo failed: " + "; ".join(failed))


def _fresh(workdir: str) -> pathlib.Path:
  """An empty folder, in place of that of an earlier demo."""
  folder = pathlib.Path(workdir)
  if folder.exists() and any(folder.iterdir()):
    if not (folder / _MARK).exists():
      raise ValueError(
        f"--workdir={workdir} is not empty and not of an earlier demo: name"
        " another folder"
      )
    shutil.rmtree(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / _MARK).touch()
  return folder


@contextlib.contextmanager
def _stage(title: str) -> Iterator[None]:
  """Prints a heading before and the seconds after."""
  print(f"\n---- {title} ----", flush=True)
  start = time.perf_counter()
  yield
  print(f"[{time.perf_counter() - start:.1f} s]", flush=True)


if __name__ == "__main__":
  main()
