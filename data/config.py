"""What data a run reads: the dataclasses behind `--config.data...`.

Imports nothing heavy: configs are read by command lines and planners.
"""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """Raw documents on disk.

  Attributes:
    path: a file, or a glob ("corpus/**/*.txt"); ".gz" is read as gzip.
    format: "jsonl", one document a line; "text", one document a file;
      "chat", one conversation a line, `{"messages": [{"role", "content"}]}`.
    text_field: jsonl: the key of the text.
    id_field: jsonl and chat: the key of the id; where it is absent the id is
      the file and line.
    name: prefix of the ids; needed where two sources hold equal ids.
  """

  path: str
  format: Literal["jsonl", "text", "chat"] = "jsonl"
  text_field: str = "text"
  id_field: str = "id"
  name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CleanConfig:
  """Limits of the filters in `data/clean.py`; None switches one off.

  Attributes:
    min_chars: shorter documents are removed.
    max_line_chars: a longer line marks minified code or encoded binary.
    min_alphabetic: letters per non-space character.
    max_repeated_lines: share of non-blank lines that occurred before in the
      same document (Gopher's rule, arXiv:2112.11446, table A1, wants 0.30 for
      web prose; source code repeats more).
  """

  min_chars: int | None = 100
  max_line_chars: int | None = 10_000
  min_alphabetic: float | None = 0.4
  max_repeated_lines: float | None = 0.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class DedupConfig:
  """Near-duplicate removal; exact duplicates are always removed.

  Attributes:
    threshold: Jaccard similarity of shingle sets from which two documents
      are the same; None keeps near duplicates.
    ngram: words a shingle.
    bands: LSH bands; with `rows`, a pair of similarity J is compared with
      probability 1 - (1 - J^rows)^bands.
    rows: hashes a band.
    seed: of the hash functions.
  """

  threshold: float | None = 0.8
  ngram: int = 5
  bands: int = 20
  rows: int = 5
  seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig:
  """Raw documents -> tokenizer and token stores (`python -m data.prepare`).

  Attributes:
    sources: what to read; all "chat", or none.
    on_bad_line: a JSONL line that cannot be used stops the run ("error") or
      is counted and left out ("skip").
    on_bad_utf8: bytes that are not UTF-8 stop the run ("error"), become
      U+FFFD ("replace"), or remove their document ("skip").
    clean: filters; chat sources are not filtered.
    dedup: duplicates; of chat sources only exact ones are removed.
    heldout_fraction: share of documents set aside, chosen by hash of id.
    tokenizer: SentencePiece model or Hugging Face folder to use; None trains
      a SentencePiece BPE on the train documents.
    vocab_size: pieces of a trained tokenizer.
    special_tokens: control tokens of a trained tokenizer, which plain text
      can never produce.
    chat_template: Jinja file for chat sources; None: the one that lies beside
      `tokenizer`, else `data.chat.DEFAULT_TEMPLATE`.
    max_tokens: longer conversations are removed; None keeps all. Text is
      never cut here: packing does that.
    seed: of the split.
  """

  sources: tuple[Source, ...]
  on_bad_line: Literal["error", "skip"] = "error"
  on_bad_utf8: Literal["error", "replace", "skip"] = "error"
  clean: CleanConfig = CleanConfig()
  dedup: DedupConfig = DedupConfig()
  heldout_fraction: float = 0.01
  tokenizer: str | None = None
  vocab_size: int = 4096
  special_tokens: tuple[str, ...] = (
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
  )
  chat_template: str | None = None
  max_tokens: int | None = None
  seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSource:
  """A token store that `data.prepare` wrote, and its share of the mixture.

  Attributes:
    path: folder of the store.
    weight: share of the rows of training relative to the other sources; rows
      are packed full, so this is the share of tokens.
  """

  path: str
  weight: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """What a training loop reads.

  Attributes:
    sources: token stores and their weights.
    tokenizer: the tokenizer that wrote them; checked by fingerprint.
    seq_len: T, positions a row.
    global_batch_size: B, rows a step over all hosts.
    seed: of the order; order and packing are a function of (seed, step).
    packing: "best_fit" packs whole documents; "concat" joins all documents
      and cuts every T positions; "none" is one document a row.
    pack_window: documents that are packed together; bounds the memory of
      planning.
    overlong: documents that do not fit in a row are cut in pieces ("split"),
      or left out ("drop"): right for conversations, whose answers mean
      nothing without their question.
    prefetch_batches: batches held ready.
    prefetch_threads: threads that assemble them; changes no byte.
  """

  sources: tuple[TokenSource, ...]
  tokenizer: str
  seq_len: int
  global_batch_size: int
  seed: int = 0
  packing: Literal["best_fit", "concat", "none"] = "best_fit"
  pack_window: int = 65_536
  overlong: Literal["split", "drop"] = "split"
  prefetch_batches: int = 8
  prefetch_threads: int = 2
