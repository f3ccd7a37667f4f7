"""Token stores: what is written is read, whole or not at all."""

import numpy as np
import pytest

from data import tokenized
from data.tokenized import Example

EXAMPLES = [
  Example("één", [5, 6, 7], [False, True, True], num_bytes=11),
  Example("empty", []),
  Example("c/3", [1, 999], num_bytes=4),
]


@pytest.mark.parametrize("vocab_size, dtype", [(1000, "<u2"), (70_000, "<u4")])
def test_round_trip(tmp_path, vocab_size, dtype):
  store = tokenized.write(
    tmp_path / "s", EXAMPLES, vocab_size=vocab_size, fingerprint="f"
  )
  memory = tokenized.InMemory(EXAMPLES)
  assert store.tokens.dtype == dtype
  for data in (store, memory):
    assert [data.id(i) for i in range(len(data))] == ["één", "empty", "c/3"]
    assert data.tokens.tolist() == [5, 6, 7, 1, 999]
    assert data.offsets.tolist() == [0, 3, 3, 5]
    assert data.mask.tolist() == [0, 1, 1, 1, 1]
    assert data.num_bytes.tolist() == [11, 0, 4]
  assert (store.vocab_size, store.fingerprint) == (vocab_size, "f")
  assert store.meta["num_bytes"] == 15


def test_no_mask_takes_no_room(tmp_path):
  store = tokenized.write(
    tmp_path / "s", EXAMPLES[1:], vocab_size=1000, fingerprint=""
  )
  assert store.mask is None and not (tmp_path / "s" / "mask.bin").exists()
  assert tokenized.InMemory(EXAMPLES[1:]).mask is None


def test_a_store_appears_whole_or_not_at_all(tmp_path):
  def broken():
    yield EXAMPLES[0]
    raise RuntimeError("the reader died")

  with pytest.raises(RuntimeError, match="reader died"):
    tokenized.write(tmp_path / "s", broken(), vocab_size=9, fingerprint="")
  assert not list(tmp_path.iterdir())
  tokenized.write(tmp_path / "s", EXAMPLES, vocab_size=1000, fingerprint="")
  with pytest.raises(ValueError, match="written once"):
    tokenized.write(tmp_path / "s", EXAMPLES, vocab_size=1000, fingerprint="")
  assert [p.name for p in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize(
  "example, message",
  [
    (Example("x", [3, 1000]), "'x' has token ids 3..1000 outside"),
    (Example("x", [-1]), "outside the vocabulary of 1000"),
    (Example("x", [1, 2], [True]), "2 tokens but a mask of 1"),
  ],
)
def test_bad_examples(tmp_path, example, message):
  with pytest.raises(ValueError, match=message):
    tokenized.write(tmp_path / "s", [example], vocab_size=1000, fingerprint="")


def test_nothing_to_write(tmp_path):
  with pytest.raises(ValueError, match="no document to write"):
    tokenized.write(tmp_path / "s", [], vocab_size=9, fingerprint="")


def test_damaged_store_is_named(tmp_path):
  tokenized.write(tmp_path / "s", EXAMPLES, vocab_size=1000, fingerprint="")
  path = tmp_path / "s" / "tokens.bin"
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(ValueError, match="tokens.bin should have 10 .* has 9"):
    tokenized.TokenStore(tmp_path / "s")
  path.unlink()
  with pytest.raises(ValueError, match="tokens.bin .* has no file"):
    tokenized.TokenStore(tmp_path / "s")
  with pytest.raises(ValueError, match="not a token store"):
    tokenized.TokenStore(tmp_path)


def test_tokens_are_mapped_not_read(tmp_path):
  store = tokenized.write(
    tmp_path / "s", EXAMPLES, vocab_size=1000, fingerprint=""
  )
  assert isinstance(store.tokens, np.memmap)
  assert not store.tokens.flags.writeable
