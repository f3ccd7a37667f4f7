"""Raw documents in; tokenizer and token stores out.

    python -m data.prepare --config=FILE.py --workdir=DIR

writes into DIR: `tokenizer.model` (or a copy of the one given), the stores
`train/` and `heldout/`, `prepare.json` with the config and what was removed
and why, and for conversations `chat_template.jinja`. One process, all
documents in memory: right for what fits there.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data import chat, clean, dedup, documents, shuffle, split, tokenized
from data import tokenizer as tokenizers
from data.config import PrepareConfig
from data.documents import Document
from data.report import Report
from data.tokenized import Example, TokenStore
from data.tokenizer import Tokenizer

_BATCH = 256  # documents tokenised at a time


@dataclasses.dataclass(frozen=True)
class Prepared:
  """What `run` made.

  Attributes:
    train: store of the documents to train on.
    heldout: store of those set aside; None if there are none.
    tokenizer: that wrote them.
    reports: one a stage, printable.
  """

  train: TokenStore
  heldout: TokenStore | None
  tokenizer: Tokenizer
  reports: list[Report]


def run(config: PrepareConfig, workdir: str | os.PathLike) -> Prepared:
  """Reads, cleans, removes duplicates, splits, tokenises and stores.

  Raises:
    ValueError: a source or setting is wrong, or nothing is left to train on.
  """
  workdir = Path(workdir)
  for name in ("train", "heldout"):
    if (workdir / name).exists():
      raise ValueError(
        f"{str(workdir / name)!r} exists: stores are written once; delete it"
        " or choose another --workdir"
      )
  is_chat = _is_chat(config)
  train, heldout, reports = select(config)
  tokenizer = _tokenizer(config, train, workdir)
  if is_chat:
    template = chat.template_for(config.tokenizer, config.chat_template)
    (workdir / "chat_template.jinja").write_text(template.source)
    encode = _Conversations(tokenizer, template, config.max_tokens)
  else:
    encode = _Texts(tokenizer)
  train_store, heldout_store = (
    _store(workdir / name, part, encode, tokenizer, reports)
    for name, part in (("train", train), ("heldout", heldout))
  )
  record = {
    "config": dataclasses.asdict(config),
    "fingerprint": tokenizer.fingerprint,
    "reports": [report.as_dict() for report in reports],
  }
  (workdir / "prepare.json").write_text(json.dumps(record, indent=2) + "\n")
  return Prepared(train_store, heldout_store, tokenizer, reports)


def select(
  config: PrepareConfig,
) -> tuple[list[Document], list[Document], list[Report]]:
  """Train and held-out documents, and what each stage removed."""
  read, cleaned = Report("read"), Report("clean")
  found = (
    document
    for source in config.sources
    for document in documents.read(
      source,
      on_bad_line=config.on_bad_line,
      on_bad_utf8=config.on_bad_utf8,
      report=read,
    )
  )
  reports = [read]
  if not _is_chat(config):
    found = clean.clean(found, config.clean, report=cleaned)
    reports.append(cleaned)
  found = list(found)
  _check_ids(found)
  found, report = dedup.remove_exact(found)
  reports.append(report)
  if config.dedup.threshold is not None and not _is_chat(config):
    found, report = dedup.remove_near(found, config.dedup)
    reports.append(report)
  train, heldout, report = split.split(
    found, fraction=config.heldout_fraction, seed=config.seed
  )
  reports.append(report)
  if not train:
    raise ValueError(
      "no document is left to train on:\n" + "\n".join(map(str, reports))
    )
  return train, heldout, reports


class _Texts:
  """Whole texts between BOS and EOS, where the tokenizer has them."""

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._ends = {
      "bos": tokenizer.bos_id is not None,
      "eos": tokenizer.eos_id is not None,
    }

  def __call__(self, part: list[Document], report: Report) -> Iterator[Example]:
    for start in range(0, len(part), _BATCH):
      some = part[start : start + _BATCH]
      encoded = self._tokenizer.encode_batch(
        [d.text for d in some], **self._ends
      )
      for document, ids in zip(some, encoded, strict=True):
        report.keep()
        yield Example(document.id, ids, num_bytes=len(document.text.encode()))


class _Conversations:
  """Conversations in a chat template, to be learnt where the assistant
  speaks."""

  def __init__(self, tokenizer, template, max_tokens: int | None):
    self._tokenizer = tokenizer
    self._template = template
    self._max_tokens = max_tokens

  def __call__(self, part: list[Document], report: Report) -> Iterator[Example]:
    for document in part:
      messages = document.meta["messages"]
      try:
        ids, mask = self._template.encode(self._tokenizer, messages)
      except ValueError as error:
        raise ValueError(f"{document.id}: {error}") from None
      if self._max_tokens is not None and len(ids) > self._max_tokens:
        report.remove(f"longer than {self._max_tokens} tokens", document.id)
        continue
      report.keep()
      yield Example(document.id, ids, mask)


def _store(path, part, encode, tokenizer, reports) -> TokenStore | None:
  if not part:
    return None
  report = Report(f"tokenise {path.name}")
  store = tokenized.write(
    path,
    encode(part, report),
    vocab_size=tokenizer.vocab_size,
    fingerprint=tokenizer.fingerprint,
  )
  report.note("tokens", len(store.tokens))
  reports.append(report)
  return store


def _tokenizer(config, train, workdir) -> Tokenizer:
  workdir.mkdir(parents=True, exist_ok=True)
  if config.tokenizer is None:
    if _is_chat(config):
      raise ValueError(
        "conversations need the tokenizer of the model to be tuned: set"
        " tokenizer to its .model file or folder"
      )
    order = shuffle.permute(  # the trainer reads a prefix: a fair one
      np.arange(len(train)), len(train), shuffle.key(config.seed)
    )
    return tokenizers.train_sentencepiece(
      (train[i].text for i in order),
      workdir / "tokenizer.model",
      vocab_size=config.vocab_size,
      special_tokens=config.special_tokens,
    )
  tokenizer = tokenizers.load(config.tokenizer)
  path = Path(config.tokenizer)
  if path.is_file() and path.suffix != ".json":
    if path.resolve() != (workdir / "tokenizer.model").resolve():
      shutil.copy(path, workdir / "tokenizer.model")
  else:
    folder = path if path.is_dir() else path.parent
    for name in tokenizers.FILES:
      if (folder / name).is_file() and folder.resolve() != workdir.resolve():
        shutil.copy(folder / name, workdir / name)
  return tokenizer


def _is_chat(config: PrepareConfig) -> bool:
  if not config.sources:
    raise ValueError("sources is empty: name at least one file or glob")
  kinds = {source.format == "chat" for source in config.sources}
  if len(kinds) > 1:
    raise ValueError(
      "sources mix format='chat' with texts: prepare them in two runs, and"
      " name both stores in the data.sources of training"
    )
  return kinds.pop()


def _check_ids(found: list[Document]) -> None:
  seen = set()
  for document in found:
    if document.id in seen:
      raise ValueError(
        f"two documents have the id {document.id!r}: set sources[...].name to"
        " tell sources apart, or id_field='' to number the lines of JSONL"
      )
    seen.add(document.id)


def main(argv=None) -> None:
  from configs import cli

  def run_and_print(config: PrepareConfig, workdir: str) -> Prepared:
    prepared = run(config, workdir)
    print(*prepared.reports, sep="\n")
    return prepared

  cli.launch(run_and_print, PrepareConfig)


if __name__ == "__main__":
  main()
