"""The tokenizer inside a GGUF file, as Hugging Face's tokenizer.json.

Byte-level BPE only: what Llama 3, SmolLM2 and Qwen use.
"""

import json
import pathlib

import gguf
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

_LLAMA3_REGEX = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_REGEX = _LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4

_IDS = {
  "bos_token": "bos_token_id",
  "eos_token": "eos_token_id",
  "unk_token": "unknown_token_id",
  "pad_token": "padding_token_id",
}


def read(reader: gguf.GGUFReader) -> tokenizers.Tokenizer:
  """The tokenizer of a file; adds no BOS by itself.

  Raises:
    ValueError: it is of a kind whose splitting rules we do not know.
  """
  kind, pre = _get(reader, "model"), _get(reader, "pre")
  known = kind == "gpt2" and pre in ("gpt-2", "smollm", "llama-bpe", "qwen2")
  if not known:
    raise ValueError(
      f"the GGUF tokenizer model={kind!r} pre={pre!r} is not supported, only"
      " byte-level BPE ('gpt2') with pre 'gpt-2', 'smollm', 'llama-bpe' or"
      " 'qwen2'; use the tokenizer.json or tokenizer.model of the model"
    )
  tokens, types = _get(reader, "tokens"), _get(reader, "token_type")
  vocab = {token: i for i, token in enumerate(tokens)}
  if len(vocab) != len(tokens):
    raise ValueError("the GGUF vocabulary holds a token twice")
  merges = [tuple(merge.split(" ")) for merge in _get(reader, "merges")]
  tokenizer = tokenizers.Tokenizer(
    # Llama 3 takes a word that is in the vocabulary as it is.
    models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
  )
  if pre == "qwen2":
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = _pre_tokenizer(pre)
  tokenizer.decoder = decoders.ByteLevel()
  for type_, special in ((_CONTROL, True), (_USER_DEFINED, False)):
    added = [
      tokenizers.AddedToken(token, special=special, normalized=False)
      for token, t in zip(tokens, types, strict=True)
      if t == type_
    ]
    add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
    add(added)
  assert tokenizer.get_vocab_size() == len(tokens)
  return tokenizer


def save(reader: gguf.GGUFReader, folder) -> None:
  """Writes tokenizer.json and tokenizer_config.json of a file.

  The second names BOS, EOS, UNK and PAD and holds the chat template.

  Args:
    reader: of the GGUF file.
    folder: made if it is not there.

  Raises:
    ValueError: see `read`.
  """
  tokenizer = read(reader)
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  config = {"tokenizer_class": "PreTrainedTokenizerFast"}
  for name, field in _IDS.items():
    token_id = _get(reader, field)
    if token_id is not None:
      config[name] = tokenizer.id_to_token(token_id)
  config["add_bos_token"] = bool(_get(reader, "add_bos_token"))
  template = reader.get_field("tokenizer.chat_template")
  if template is not None:
    config["chat_template"] = template.contents()
  text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
  (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _get(reader: gguf.GGUFReader, name: str):
  field = reader.get_field(f"tokenizer.ggml.{name}")
  return None if field is None else field.contents()


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
  """How llama.cpp cuts a text before merging, in terms of `tokenizers`."""

  def split(regex):
    return pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")

  gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
  bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  stages = {
    "gpt-2": [gpt2],
    "smollm": [split(r"\p{N}"), gpt2],
    "llama-bpe": [split(_LLAMA3_REGEX), bytes_only],
    "qwen2": [split(_QWEN2_REGEX), bytes_only],
  }
  return pre_tokenizers.Sequence(stages[pre])
