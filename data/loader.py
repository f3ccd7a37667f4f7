"""Batches as a pure function of (seed, step).

Each source is planned into rows once, from lengths (`data/pack.py`); its rows
are shuffled anew every epoch by a computed permutation (`data/shuffle.py`);
sources are interleaved by weight (`data/mixture.py`). Nothing is carried from
step to step: any step of any host is computed directly, so neither workers
nor hosts nor interruptions can change the order, and the only state of the
data is the step.

What is packed together stays together in every epoch. Segments do not see
each other, so a document's loss does not depend on its neighbours; which rows
meet in a batch does change.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from data import pack, shuffle
from data.config import DataConfig
from data.mixture import Mixture
from data.pack import Batch
from data.tokenized import Tokenized, TokenStore
from data.tokenizer import Tokenizer

# What a key is for, so that no two uses of a seed share a permutation.
_DOCUMENTS, _ROWS = 1, 2


class Loader:
  """Packed batches of one or several tokenised data sets.

  Args:
    datasets: a token store, or several.
    seq_len: T.
    global_batch_size: B, rows a step over all hosts.
    seed: of the order.
    rows: the rows of the global batch that this host reads; None: all.
    weights: shares of the data sets in the rows; None: equal.
    packing: "best_fit", "concat" or "none", see `plan_packing`.
    window: documents packed together.
    overlong: "split" or "drop", see `plan_packing`.
    shuffle: False keeps documents and rows in the order of the data set.
    num_epochs: passes over the data; None never ends. The last batch is
      filled up with padding rows. Only with one data set: with several, an
      epoch of one is not an epoch of another.
    prefetch_batches: see `iterate`.
    prefetch_threads: see `iterate`.

  Attributes:
    num_rows: rows of each data set, one pass [S].
    num_batches: steps there are; None if it never ends.
    efficiency: share of positions that hold a token.
  """

  def __init__(
    self,
    datasets: Tokenized | Sequence[Tokenized],
    *,
    seq_len: int,
    global_batch_size: int,
    seed: int = 0,
    rows: slice | None = None,
    weights: Sequence[float] | None = None,
    packing: str = "best_fit",
    window: int = 65_536,
    overlong: str = "split",
    shuffle: bool = True,
    num_epochs: int | None = None,
    prefetch_batches: int = 8,
    prefetch_threads: int = 2,
  ):
    self.datasets = (
      list(datasets) if isinstance(datasets, list | tuple) else [datasets]
    )
    if weights is None:
      weights = [1.0] * len(self.datasets)
    if len(weights) != len(self.datasets):
      raise ValueError(
        f"{len(weights)} weights for {len(self.datasets)} data sets"
      )
    if global_batch_size < 1:
      raise ValueError(
        f"global_batch_size must be at least 1, got {global_batch_size}"
      )
    if num_epochs is not None and len(self.datasets) > 1:
      raise ValueError(
        f"num_epochs={num_epochs} needs one data set, got"
        f" {len(self.datasets)}: an epoch of a mixture is not defined"
      )
    self.seq_len = seq_len
    self.global_batch_size = global_batch_size
    self.seed = seed
    self.shuffle = shuffle
    self.rows = range(global_batch_size)[rows or slice(None)]
    if self.rows.step != 1 or not self.rows:
      raise ValueError(
        f"rows={rows} must name one or more neighbouring rows of the"
        f" {global_batch_size} of the global batch"
      )
    self._mixture = Mixture(weights)
    self._prefetch = (prefetch_batches, prefetch_threads)
    self.plans = [
      self._plan(s, packing, window, overlong)
      for s in range(len(self.datasets))
    ]
    self.num_rows = [plan.num_rows for plan in self.plans]
    self.num_batches = None
    if num_epochs is not None:
      total = num_epochs * self.num_rows[0]
      self.num_batches = -(-total // global_batch_size)
    self._num_epochs = num_epochs

  @property
  def sizes(self) -> np.ndarray:
    """int64 [pieces], positions of each piece of a document."""
    return np.concatenate([plan.size for plan in self.plans])

  @property
  def efficiency(self) -> float:
    shares = [plan.efficiency for plan in self.plans]
    return float(np.dot(self._mixture.rates, shares))

  def batch(self, step: int) -> tuple[Batch, list[list[str]]]:
    """This host's rows of the batch of a step.

    Args:
      step: from 0 on.

    Returns:
      (batch, document_ids): tokens, targets, positions, segment_ids int32
      and loss_weights float32 [rows, T]; for each row the ids of the
      documents in it, in order.

    Raises:
      IndexError: the step lies past the last epoch.
    """
    if step < 0 or (self.num_batches is not None and step >= self.num_batches):
      raise IndexError(f"step {step} of {self.num_batches}")
    first = step * self.global_batch_size
    source, index = self._mixture.locate(
      first + self.rows.start, first + self.rows.stop
    )
    batch = pack.empty_batch(len(self.rows), self.seq_len)
    document_ids = [[] for _ in self.rows]
    for s in np.unique(source):
      at = np.flatnonzero(source == s)
      epoch, row = np.divmod(index[at], self.num_rows[s])
      if self._num_epochs is not None:  # rows past the end stay padding
        at, row, epoch = (x[epoch < self._num_epochs] for x in (at, row, epoch))
        if not at.size:
          continue
      if self.shuffle:
        keys = shuffle.key(self.seed, _ROWS, s, epoch)
        row = shuffle.permute(row, self.num_rows[s], keys)
      documents = pack.fill(batch, at, self.plans[s], row, self.datasets[s])
      for i, numbers in zip(at, documents, strict=True):
        document_ids[i] = [self.datasets[s].id(n) for n in numbers.tolist()]
    return batch, document_ids

  def state(self, step: int) -> dict[str, list[int]]:
    """Where each data set stands before a step; a function of the step.

    Returns:
      {"epoch": [S], "row": [S]}: passes completed, rows into the next.
    """
    consumed = self._mixture.counts(step * self.global_batch_size)
    epoch, row = np.divmod(consumed, self.num_rows)
    return {"epoch": epoch.tolist(), "row": row.tolist()}

  def iterate(
    self, start_step: int = 0
  ) -> Iterator[tuple[int, Batch, list[list[str]]]]:
    """Yields (step, batch, document_ids) from a step on.

    Grain's threads work `prefetch_batches` ahead; their number changes
    speed only.
    """
    import grain

    stop = 2**62 if self.num_batches is None else self.num_batches
    if start_step >= stop:
      return
    ahead, threads = self._prefetch
    read_options = grain.ReadOptions(
      num_threads=threads, prefetch_buffer_size=ahead
    )
    steps = grain.MapDataset.range(start_step, stop)
    batches = steps.map(lambda step: (step, *self.batch(step)))
    yield from batches.to_iter_dataset(read_options)

  def _plan(self, s: int, packing: str, window: int, overlong: str):
    data = self.datasets[s]
    lengths = np.diff(data.offsets)
    order = np.arange(len(lengths))
    if self.shuffle and len(lengths):
      order = shuffle.permute(
        order, len(lengths), shuffle.key(self.seed, _DOCUMENTS, s)
      )
    plan = pack.plan_packing(
      lengths,
      self.seq_len,
      packing=packing,
      order=order,
      window=window,
      overlong=overlong,
    )
    if not plan.num_rows:
      raise ValueError(
        f"data set {s} gives no row of seq_len={self.seq_len}: it has"
        f" {len(lengths)} documents and {plan.num_dropped} were left out"
        f" (overlong={overlong!r})"
      )
    return plan


def open_loader(
  config: DataConfig, tokenizer: Tokenizer, *, rows: slice | None = None
) -> Loader:
  """The loader of a training run.

  Args:
    config: stores, weights, shape of the batch, seed.
    tokenizer: `tokenizer.load(config.tokenizer)`.
    rows: this host's rows of the global batch; None: all.

  Raises:
    ValueError: a store is missing or was written by another tokenizer.
  """
  if not config.sources:
    raise ValueError("data.sources is empty: name at least one token store")
  stores = [open_store(source.path, tokenizer) for source in config.sources]
  return Loader(
    stores,
    seq_len=config.seq_len,
    global_batch_size=config.global_batch_size,
    seed=config.seed,
    rows=rows,
    weights=[source.weight for source in config.sources],
    packing=config.packing,
    window=config.pack_window,
    overlong=config.overlong,
    prefetch_batches=config.prefetch_batches,
    prefetch_threads=config.prefetch_threads,
  )


def open_store(path: str, tokenizer: Tokenizer) -> TokenStore:
  """Opens a token store and checks that this tokenizer wrote it."""
  store = TokenStore(path)
  if store.fingerprint != tokenizer.fingerprint:
    raise ValueError(
      f"{path!r} was written by a tokenizer with fingerprint"
      f" {store.fingerprint} ({store.vocab_size} tokens), the one given has"
      f" {tokenizer.fingerprint} ({tokenizer.vocab_size} tokens): set"
      " data.tokenizer to the one beside the store, or run data.prepare again"
    )
  return store
