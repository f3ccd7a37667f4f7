"""A small vocabulary of each kind; the real one is in test_smollm2.py."""

import json

import gguf as library
import pytest
from tokenizers import pre_tokenizers

from model.formats import gguf, gguf_tokenizer
from tests.model.formats import gguf_files

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
MERGES = ["1 2", "12 3", "\u0120 \u0120", "' s", "a b", "ab c"]


def file(path, *, model="gpt2", pre="smollm", tokens=()):
  """All bytes, then merges, then one control and one user-defined token."""
  bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
  merged = [merge.replace(" ", "") for merge in MERGES] + ["abcd"]
  vocab = bytes_ + merged + ["<|end|>", "<tab>", *tokens]
  types = [NORMAL] * len(bytes_ + merged) + [CONTROL, USER_DEFINED]
  writer = library.GGUFWriter(path, "llama")
  writer.add_tokenizer_model(model)
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(vocab)
  writer.add_token_types(types + [NORMAL] * len(tokens))
  writer.add_token_merges(MERGES)
  writer.add_eos_token_id(vocab.index("<|end|>"))
  writer.add_chat_template("{{ messages }}")
  gguf_files.finish(writer)
  return gguf.open_file(path)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_round_trips(tmp_path, pre):
  tokenizer = gguf_tokenizer.read(file(tmp_path / "t.gguf", pre=pre))
  text = "it's 1234 abc\n\n\t caf\u00e9 \u4f60\u597d  abcd's"
  assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
  ("pre", "text", "pieces"),
  [
    # Digits: each alone; joined freely; at most three; each alone.
    ("smollm", "1234", ["1", "2", "3", "4"]),
    ("gpt-2", "1234", ["123", "4"]),
    ("llama-bpe", "1234", ["123", "4"]),
    ("llama-bpe", "0123", ["0", "12", "3"]),
    ("qwen2", "1234", ["1", "2", "3", "4"]),
    # A word of the vocabulary that no merge makes.
    ("gpt-2", "abcd", ["abc", "d"]),
    ("llama-bpe", "abcd", ["abcd"]),
    # The last space of a run belongs to what follows.
    ("gpt-2", "   x", ["\u0120\u0120", "\u0120", "x"]),
    # A composed letter is one letter only after NFC.
    ("qwen2", "e\u0301", ["\u00c3", "\u00a9"]),
    ("smollm", "e\u0301", ["e", "\u00cc", "\u0123"]),
  ],
)
def test_splits_as_llama_cpp_does(tmp_path, pre, text, pieces):
  tokenizer = gguf_tokenizer.read(file(tmp_path / "t.gguf", pre=pre))
  assert tokenizer.encode(text).tokens == pieces


def test_control_tokens_are_special(tmp_path):
  tokenizer = gguf_tokenizer.read(file(tmp_path / "t.gguf"))
  ids = tokenizer.encode("a<|end|><tab>").ids
  assert [tokenizer.id_to_token(i) for i in ids] == ["a", "<|end|>", "<tab>"]
  assert tokenizer.decode(ids) == "a<tab>"  # leaves out what is special


def test_saved_folder_names_tokens_and_template(tmp_path):
  gguf_tokenizer.save(file(tmp_path / "t.gguf"), tmp_path / "out")
  config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
  assert config["eos_token"] == "<|end|>"
  assert config["chat_template"] == "{{ messages }}"
  assert "bos_token" not in config
  assert (tmp_path / "out/tokenizer.json").exists()


@pytest.mark.parametrize("kind", [{"model": "llama"}, {"pre": "deepseek-llm"}])
def test_other_kinds_are_refused(tmp_path, kind):
  with pytest.raises(ValueError, match="byte-level BPE"):
    gguf_tokenizer.read(file(tmp_path / "t.gguf", **kind))


def test_a_token_twice_is_refused(tmp_path):
  with pytest.raises(ValueError, match="holds a token twice"):
    gguf_tokenizer.read(file(tmp_path / "t.gguf", tokens=["a"]))
