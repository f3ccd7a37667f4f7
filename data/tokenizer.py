"""Text <-> token ids: SentencePiece and Hugging Face behind one protocol.

Special tokens (BOS, EOS, chat roles) are control tokens: text that happens
to spell "<|user|>" is encoded as ordinary text unless `allow_special` is set.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

# The files that make up a tokenizer, for whoever copies one.
FILES = (
  "tokenizer.model",
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
)
CHAT_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

# Runs that source code is full of; spaces are written as SentencePiece's "▁".
_RUNS = ("\n", "\n\n", "\t", "\t\t") + tuple(
  "▁" * n for n in (2, 3, 4, 6, 8, 12, 16, 20)
)
_SPACE = "▁"  # SentencePiece writes a space so, and reads it as a space
_MAX_SENTENCE_BYTES = 4192  # SentencePiece leaves longer ones out of training


class Tokenizer(Protocol):
  """What the rest of the code asks of a tokenizer.

  Attributes:
    vocab_size: ids are in [0, vocab_size).
    bos_id, eos_id, pad_id, unk_id: None where the tokenizer has none.
    special_tokens: control token -> id, BOS and EOS included.
    fingerprint: hash of everything that decides the ids.
  """

  vocab_size: int
  bos_id: int | None
  eos_id: int | None
  pad_id: int | None
  unk_id: int | None
  special_tokens: Mapping[str, int]
  fingerprint: str

  def encode(
    self,
    text: str,
    *,
    bos: bool = False,
    eos: bool = False,
    allow_special: bool = False,
  ) -> list[int]:
    """Ids of a text; `allow_special` reads control tokens spelled in it."""

  def encode_batch(
    self, texts: Sequence[str], *, bos: bool = False, eos: bool = False
  ) -> list[list[int]]:
    """`encode` of many texts on several threads."""

  def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
    """Text of ids; control tokens are left out, or spelled."""

  def id_to_piece(self, token_id: int) -> str:
    """The vocabulary entry of an id, as the tokenizer spells it."""


class SentencePieceTokenizer:
  """A SentencePiece model, see `Tokenizer` and `train_sentencepiece`."""

  def __init__(self, path: str | os.PathLike):
    import sentencepiece

    proto = Path(path).read_bytes()
    self._model = sentencepiece.SentencePieceProcessor()
    try:
      self._model.LoadFromSerializedProto(proto)
    except RuntimeError as error:
      raise ValueError(
        f"{path} is not a SentencePiece model ({error})"
      ) from None
    self.vocab_size = self._model.vocab_size()
    self.bos_id = _valid(self._model.bos_id())
    self.eos_id = _valid(self._model.eos_id())
    self.pad_id = _valid(self._model.pad_id())
    self.unk_id = _valid(self._model.unk_id())
    self.special_tokens = {
      self._model.id_to_piece(i): i
      for i in range(self.vocab_size)
      if self._model.is_control(i)
    }
    self.fingerprint = hashlib.sha256(proto).hexdigest()[:16]
    # A literal "▁" would come back as a space: it goes in as its bytes. Not
    # where there are none, or where each part of a text would get a prefix.
    self._space_bytes = [
      self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()
    ]
    self._keeps_space = (
      self.unk_id not in self._space_bytes
      and not self._model.encode_as_pieces("a")[0].startswith(_SPACE)
    )

  def encode(self, text, *, bos=False, eos=False, allow_special=False):
    if allow_special:
      ids = []
      for part, special in split_special(text, self.special_tokens):
        ids += [self.special_tokens[part]] if special else self._plain(part)
    else:
      ids = self._plain(text)
    return _with_ends(self, ids, bos, eos)

  def encode_batch(self, texts, *, bos=False, eos=False):
    ids = self._model.encode(list(texts), num_threads=os.cpu_count())
    return [
      _with_ends(self, self._plain(t) if _SPACE in t else i, bos, eos)
      for t, i in zip(texts, ids, strict=True)
    ]

  def _plain(self, text: str) -> list[int]:
    if _SPACE not in text or not self._keeps_space:
      return self._model.encode(text)
    ids = []
    for i, part in enumerate(text.split(_SPACE)):
      ids += self._space_bytes if i else []
      ids += self._model.encode(part)
    return ids

  def decode(self, ids, *, skip_special=True):
    ids = [int(i) for i in ids]
    if skip_special:
      return self._model.decode(ids)
    return "".join(
      self._model.id_to_piece(run[0]) if special else self._model.decode(run)
      for run, special in _runs(ids, set(self.special_tokens.values()))
    )

  def id_to_piece(self, token_id):
    return self._model.id_to_piece(int(token_id))


class HuggingFaceTokenizer:
  """A `tokenizer.json`, see `Tokenizer`.

  BOS, EOS and PAD are named by `tokenizer_config.json` beside it; the
  template processor of `tokenizer.json` is not used, so that BOS is added in
  one place only.
  """

  def __init__(self, path: str | os.PathLike):
    import tokenizers

    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    self._json = path.read_text()
    try:
      self._model = tokenizers.Tokenizer.from_str(self._json)
    except Exception as error:  # the library raises bare Exception
      raise ValueError(f"{path} is not a tokenizer.json ({error})") from None
    self._model.encode_special_tokens = True  # text never spells them
    self._model.no_truncation()
    self._model.no_padding()
    self.vocab_size = self._model.get_vocab_size(with_added_tokens=True)
    self.special_tokens = {
      token.content: i
      for i, token in self._model.get_added_tokens_decoder().items()
      if token.special
    }
    named = _named_tokens(path.parent)
    self.bos_id = self._id(named.get("bos_token"))
    self.eos_id = self._id(named.get("eos_token"))
    self.pad_id = self._id(named.get("pad_token"))
    self.unk_id = self._id(named.get("unk_token"))
    self.fingerprint = hashlib.sha256(
      json.dumps([self._json, self.bos_id, self.eos_id]).encode()
    ).hexdigest()[:16]

  @functools.cached_property
  def _model_with_special(self):
    import tokenizers

    model = tokenizers.Tokenizer.from_str(self._json)
    model.no_truncation()
    model.no_padding()
    return model

  def _id(self, piece: str | None) -> int | None:
    return None if piece is None else self._model.token_to_id(piece)

  def encode(self, text, *, bos=False, eos=False, allow_special=False):
    model = self._model_with_special if allow_special else self._model
    ids = model.encode(text, add_special_tokens=False).ids
    return _with_ends(self, ids, bos, eos)

  def encode_batch(self, texts, *, bos=False, eos=False):
    encodings = self._model.encode_batch(list(texts), add_special_tokens=False)
    return [_with_ends(self, e.ids, bos, eos) for e in encodings]

  def decode(self, ids, *, skip_special=True):
    return self._model.decode(
      [int(i) for i in ids], skip_special_tokens=skip_special
    )

  def id_to_piece(self, token_id):
    piece = self._model.id_to_token(int(token_id))
    if piece is None:
      raise ValueError(
        f"token id {token_id} is not in the vocabulary of {self.vocab_size}"
      )
    return piece


def load(path: str | os.PathLike) -> Tokenizer:
  """Opens a SentencePiece model or a Hugging Face tokenizer.

  Args:
    path: a `.model` file, a `tokenizer.json`, or a folder that holds
      `tokenizer.json` or `tokenizer.model`.

  Raises:
    ValueError: nothing of the kind is there.
  """
  path = Path(path)
  if path.is_dir():
    for name in ("tokenizer.json", "tokenizer.model"):
      if (path / name).is_file():
        path = path / name
        break
    else:
      raise ValueError(
        f"tokenizer={str(path)!r} holds neither tokenizer.json nor"
        f" tokenizer.model; it has {sorted(os.listdir(path))[:10]}"
      )
  if not path.is_file():
    raise ValueError(
      f"tokenizer={str(path)!r} does not exist; give a SentencePiece .model"
      " or a Hugging Face folder (python -m data.prepare trains one)"
    )
  if path.suffix == ".json":
    return HuggingFaceTokenizer(path)
  return SentencePieceTokenizer(path)


def train_sentencepiece(
  texts: Iterable[str],
  path: str | os.PathLike,
  *,
  vocab_size: int,
  special_tokens: Sequence[str] = CHAT_TOKENS,
  max_bytes: int = 20_000_000,
) -> SentencePieceTokenizer:
  """Trains BPE with byte fallback (arXiv:1808.06226) whose text round-trips.

  No normalisation, no dummy prefix, every space kept; runs of spaces and
  newlines are pieces of their own, which source code needs. The same texts
  give the same model.

  Args:
    texts: documents; read until `max_bytes` of UTF-8 are seen, so shuffle
      them first where they are sorted.
    path: where the model goes; it appears whole or not at all.
    vocab_size: pieces, among them 256 bytes and the special tokens.
    special_tokens: control tokens after <unk> <s> </s> <pad>.
    max_bytes: enough for a good vocabulary; time grows with it.

  Raises:
    ValueError: no text, or more pieces asked than it can give.
  """
  import io

  import sentencepiece

  model = io.BytesIO()
  sentences = _sentences(texts, max_bytes)
  try:
    first = next(sentences)
  except StopIteration:
    raise ValueError("no text to train a tokenizer on") from None
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=_chain(first, sentences),
      model_writer=model,
      model_type="bpe",
      vocab_size=vocab_size,
      byte_fallback=True,
      normalization_rule_name="identity",
      add_dummy_prefix=False,
      remove_extra_whitespaces=False,
      split_digits=True,
      character_coverage=0.9995,
      unk_id=0,
      bos_id=1,
      eos_id=2,
      pad_id=3,
      control_symbols=list(special_tokens),
      user_defined_symbols=list(_RUNS),
      max_sentence_length=_MAX_SENTENCE_BYTES,
      num_threads=2,  # written into the model, so part of its hash
      minloglevel=2,
    )
  except RuntimeError as error:
    raise ValueError(
      f"cannot train a tokenizer of vocab_size={vocab_size}: {error}; a small"
      " corpus needs a smaller vocab_size, and 256 bytes,"
      f" {len(_RUNS)} runs of spaces and the special tokens must fit in"
    ) from None
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f".{path.name}.{os.getpid()}")
  partial.write_bytes(model.getvalue())
  os.replace(partial, path)
  return SentencePieceTokenizer(path)


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
  """Refuses a model whose vocabulary is not that of the tokenizer.

  A model may be up to 1024 entries larger: checkpoints pad the table to a
  multiple of a power of two (Qwen2: 151,936 for 151,665 tokens).
  """
  if not 0 <= vocab_size - tokenizer.vocab_size <= 1024:
    raise ValueError(
      f"the tokenizer has {tokenizer.vocab_size} tokens but"
      f" model.vocab_size={vocab_size}: set model.vocab_size to"
      f" {tokenizer.vocab_size} (or up to 1024 more, as padding), or use the"
      " tokenizer that the checkpoint was trained with"
    )


def split_special(
  text: str, special_tokens: Iterable[str]
) -> list[tuple[str, bool]]:
  """Cuts a text at special tokens: (part, whether it is one), longest first."""
  special_tokens = set(special_tokens)
  if not special_tokens:
    return [(text, False)] if text else []
  longest_first = sorted(special_tokens, key=lambda t: (-len(t), t))
  pattern = "(" + "|".join(map(re.escape, longest_first)) + ")"
  return [(p, p in special_tokens) for p in re.split(pattern, text) if p]


def _sentences(texts: Iterable[str], max_bytes: int):
  """Lines, and parts of long lines: a newline is a piece of its own."""
  seen = 0
  for text in texts:
    for line in text.splitlines():
      for start in range(0, len(line), _MAX_SENTENCE_BYTES // 4):
        part = line[start : start + _MAX_SENTENCE_BYTES // 4]
        seen += len(part.encode()) + 1
        yield part.replace("\0", "")
    if seen >= max_bytes:
      return


def _chain(first, rest):
  yield first
  yield from rest


def _runs(ids: list[int], special: set[int]):
  """(ids, False) of maximal ordinary runs and ([id], True) of special ids."""
  run = []
  for i in ids:
    if i in special:
      if run:
        yield run, False
      yield [i], True
      run = []
    else:
      run.append(i)
  if run:
    yield run, False


def _with_ends(tokenizer, ids: list[int], bos: bool, eos: bool) -> list[int]:
  for wanted, name in ((bos, "bos"), (eos, "eos")):
    if wanted and getattr(tokenizer, f"{name}_id") is None:
      raise ValueError(
        f"{name}=True but the tokenizer has no {name.upper()} token"
      )
  head = [tokenizer.bos_id] if bos else []
  tail = [tokenizer.eos_id] if eos else []
  return head + ids + tail


def _valid(token_id: int) -> int | None:
  return None if token_id < 0 else token_id


def _named_tokens(folder: Path) -> dict[str, str]:
  """The pieces of "bos_token" and the like, from beside tokenizer.json."""
  named = {}
  for name in ("special_tokens_map.json", "tokenizer_config.json"):
    if (folder / name).is_file():
      for key, value in json.loads((folder / name).read_text()).items():
        piece = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(piece, str):
          named[key] = piece
  return named
