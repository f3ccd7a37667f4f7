"""Nats, tokens and bytes of documents under a model, document by document."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from data.loader import Loader
from data.tokenized import Example, InMemory
from model.execution import Execution
from model.losses import batch_log_probs
from model.transformer import Transformer
from sharding.arrays import to_global


@dataclasses.dataclass(frozen=True)
class Scores:
  """Sums over the tokens of each document; add them up before you divide.

  Attributes:
    nats: float64 [documents], -log P of the tokens that count.
    tokens: int64 [documents], how many count.
    bytes: int64 [documents], UTF-8 bytes of the text; 0: not known.
  """

  nats: np.ndarray
  tokens: np.ndarray
  bytes: np.ndarray

  @property
  def bits_per_byte(self) -> float:
    """Of all documents: it does not depend on the tokenizer."""
    return float(self.nats.sum() / np.log(2) / self.bytes.sum())

  @property
  def perplexity(self) -> float:
    """Of all tokens."""
    return float(np.exp(self.nats.sum() / self.tokens.sum()))


def score(
  model: Transformer,
  examples: Sequence[Example],
  *,
  seq_len: int,
  batch_size: int,
  execution: Execution,
) -> Scores:
  """Scores documents; the first token of each is given.

  A document longer than a row is read through overlapping windows that move
  by half a row: every token counts once, with at least half a row of context
  where the document has it. Windows are packed.

  Args:
    model: the weights.
    examples: tokenised documents; where one has a mask, only its marked
      tokens count.
    seq_len: T, positions a row.
    batch_size: rows that are computed together.
    execution: how to run; needs a mesh.
  """
  windows, owners = [], []
  for number, example in enumerate(examples):
    for window in _windows(example, seq_len):
      windows.append(dataclasses.replace(window, id=str(len(owners))))
      owners.append(number)
  owners = np.array(owners)
  loader = Loader(
    InMemory(windows),
    seq_len=seq_len,
    global_batch_size=batch_size,
    shuffle=False,
    num_epochs=1,
  )

  nats = np.zeros(len(examples))
  tokens = np.zeros(len(examples), np.int64)
  for _, batch, ids in loader.iterate():
    placed = to_global(batch, execution.mesh, execution.rules)
    values_BT = np.asarray(_log_probs(model, placed, execution), np.float64)
    for row, window_ids in enumerate(ids):
      # Segment s of the row is the s-th window in it; segment 0 is padding.
      segment = batch["segment_ids"][row]
      real = segment > 0
      owner = owners[np.array(window_ids, int)][segment[real] - 1]
      np.subtract.at(nats, owner, values_BT[row, real])
      counts = batch["loss_weights"][row, real].astype(np.int64)
      np.add.at(tokens, owner, counts)
  return Scores(nats, tokens, np.array([e.num_bytes for e in examples]))


# Not inside `score`: there each call would compile it again.
_log_probs = jax.jit(batch_log_probs, static_argnames="execution")


def _windows(example: Example, seq_len: int) -> Iterator[Example]:
  """Pieces of at most seq_len + 1 tokens, masked where a former one counted."""
  total, step = len(example.tokens), max(1, seq_len // 2)
  mask = np.ones(total, bool) if example.mask is None else example.mask
  begin, counted = 0, 1
  while counted < total:
    end = min(total, begin + seq_len + 1)
    mine = np.array(mask[begin:end], bool)
    mine[: counted - begin] = False
    yield dataclasses.replace(
      example, tokens=example.tokens[begin:end], mask=mine
    )
    begin, counted = begin + step, end
