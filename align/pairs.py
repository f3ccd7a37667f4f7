"""Preference pairs: JSONL in, batches of interleaved rows out.

Batches are a function of (seed, step), as in `data/loader.py`. Pairs are not
packed: a row is one conversation, so a sum over the row is a sum over one
answer.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from align.config import PairsConfig
from data import chat, documents, shuffle
from data.chat import ChatTemplate
from data.config import Source
from data.pack import Batch, pair_rows
from data.report import Report
from data.tokenized import Example
from data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Pair:
  """Two tokenised conversations that differ in the last answer.

  Attributes:
    chosen: the preferred one; its mask marks the answer.
    rejected: the other one.
  """

  chosen: Example
  rejected: Example

  @property
  def id(self) -> str:
    return self.chosen.id


def open_pairs(
  config: PairsConfig, path: str | None, tokenizer: Tokenizer
) -> list[Pair]:
  """Reads `config.path` or `config.held_out`; says what was left out.

  Args:
    config: format and limits.
    path: which of the two; None: no pairs.
    tokenizer: `tokenizer.load(config.tokenizer)`.
  """
  if path is None:
    return []
  report = Report(f"pairs of {path}")
  pairs = read_pairs(
    path,
    tokenizer,
    chat.template_for(config.tokenizer, config.chat_template),
    seq_len=config.seq_len,
    on_bad_line=config.on_bad_line,
    report=report,
  )
  print(report)
  return pairs


def read_pairs(
  path: str,
  tokenizer: Tokenizer,
  template: ChatTemplate,
  *,
  seq_len: int,
  on_bad_line: str = "error",
  report: Report,
) -> list[Pair]:
  """Reads and tokenises pairs (the format is in `PairsConfig`).

  Args:
    path: a file or a glob.
    tokenizer: of the model.
    template: of conversations.
    seq_len: longer pairs are left out.
    on_bad_line: "error" or "skip".
    report: counts what is left out, and why.

  Raises:
    ValueError: a bad line, named; or no pair is left.
  """
  source = Source(path=path, text_field="chosen")
  pairs = []
  lines = Report("read")  # counted below, by pair
  for line in documents.read(source, on_bad_line=on_bad_line, report=lines):
    try:
      prompt, rejected = _fields(line)
    except ValueError as error:
      if on_bad_line == "error":
        raise ValueError(f"{path}, pair {line.id!r}: {error}") from None
      report.remove("bad line", line.id)
      continue
    pair = Pair(
      *(
        Example(line.id, *_encode(tokenizer, template, prompt, answer))
        for answer in (line.text, rejected)
      )
    )
    longest = max(len(pair.chosen.tokens), len(pair.rejected.tokens))
    if longest > seq_len + 1:
      report.remove(f"longer than {seq_len + 1} tokens", line.id)
      continue
    report.keep()
    pairs.append(pair)
  for reason, ids in lines.removed.items():
    for document_id in ids:
      report.remove(reason, document_id)
  if not pairs:
    raise ValueError(f"data.path={path!r} holds no usable pair\n{report}")
  return pairs


def _fields(line: documents.Document) -> tuple[list[dict], str]:
  """The messages of the prompt, and the rejected answer."""
  prompt, rejected = line.meta.get("prompt"), line.meta.get("rejected")
  if isinstance(prompt, str):
    prompt = [{"role": "user", "content": prompt}]
  if not isinstance(prompt, list) or not isinstance(rejected, str):
    raise ValueError(
      'wanted "prompt" (a string or a list of messages), "chosen" and'
      f' "rejected" (strings); the other fields are {sorted(line.meta)}'
    )
  return prompt, rejected


def _encode(tokenizer, template, prompt, answer):
  """Ids and mask of a conversation, where only the last answer counts."""
  start = len(template.encode_prompt(tokenizer, prompt))
  ids, mask = template.encode(
    tokenizer, [*prompt, {"role": "assistant", "content": answer}]
  )
  return ids, [wanted and i >= start for i, wanted in enumerate(mask)]


class PairBatches:
  """Endless shuffled batches of pairs; `train.loop.Batches`.

  Args:
    pairs: all of them, on every host.
    reference_log_probs: float32 [pairs, 2], of chosen and rejected answers;
      becomes a field of the batch. None: whoever places the batch adds it.
    seq_len: T.
    global_batch_size: pairs a step over all hosts.
    rows: rows of the global batch (two a pair) that this host reads.
    seed: of the order.

  Attributes:
    seq_len: T.
  """

  def __init__(
    self,
    pairs: Sequence[Pair],
    reference_log_probs: np.ndarray | None = None,
    *,
    seq_len: int,
    global_batch_size: int,
    rows: slice,
    seed: int,
  ):
    self._pairs = pairs
    self.seq_len = seq_len
    self._batch_size = global_batch_size
    self._local = np.arange(rows.start // 2, rows.stop // 2)
    self._seed = seed
    self._reference_log_probs = reference_log_probs

  @property
  def sizes(self) -> np.ndarray:
    """int64 [rows of all pairs], positions of each."""
    sides = [side for p in self._pairs for side in (p.chosen, p.rejected)]
    return np.array([len(side.tokens) - 1 for side in sides])

  def batch(self, step: int) -> tuple[Batch, list[list[str]]]:
    """This host's rows of the batch of a step, and the pairs' ids by row."""
    epoch, index = np.divmod(
      step * self._batch_size + self._local, len(self._pairs)
    )
    numbers = shuffle.permute(
      index, len(self._pairs), shuffle.key(self._seed, epoch)
    )
    batch = _rows([self._pairs[n] for n in numbers], self.seq_len)
    if self._reference_log_probs is not None:
      batch["reference_log_probs"] = self._reference_log_probs[numbers].ravel()
    return batch, [[self._pairs[n].id] for n in numbers for _ in range(2)]

  def iterate(
    self, start_step: int = 0
  ) -> Iterator[tuple[int, Batch, list[list[str]]]]:
    """Yields (step, batch, document_ids), endlessly."""
    for step in itertools.count(start_step):
      yield step, *self.batch(step)

  def state(self, step: int) -> dict[str, int]:
    """Passes completed before a step, and pairs into the next."""
    epoch, pair = divmod(step * self._batch_size, len(self._pairs))
    return {"epoch": epoch, "pair": pair}


def in_order(
  pairs: Sequence[Pair],
  reference_log_probs: np.ndarray | None = None,
  *,
  seq_len: int,
  global_batch_size: int,
  rows: slice,
) -> Iterator[Batch]:
  """Yields this host's rows of all pairs, once; padding fills the last batch.

  The arguments are those of `PairBatches`.
  """
  for start in range(0, len(pairs), global_batch_size):
    some = slice(start, start + global_batch_size)
    batch = _rows(pairs[some], seq_len)
    if reference_log_probs is not None:
      batch["reference_log_probs"] = reference_log_probs[some].ravel()
    missing = 2 * global_batch_size - len(batch["tokens"])
    for name, x in batch.items():
      x = np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
      batch[name] = x[rows]
    yield batch


def _rows(pairs: Sequence[Pair], seq_len: int) -> Batch:
  return pair_rows(
    [p.chosen for p in pairs], [p.rejected for p in pairs], seq_len=seq_len
  )
