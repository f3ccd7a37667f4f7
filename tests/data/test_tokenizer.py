"""Round trips, control tokens, and errors that say what to do."""

import hashlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data import tokenizer

# Any Unicode but lone surrogates, which are no valid text.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
# Text that is likely to meet pieces, runs and control tokens.
CODE = st.lists(
  st.sampled_from(
    [
      " ",
      "  ",
      "    ",
      "\n",
      "\t",
      "\r\n",
      "▁",
      "▁▁",
      "<|user|>",
      "<s>",
      "</s>",
      "<unk>",
      "<0x0A>",
      "def",
      "self.",
      "é",
      "e\u0301",
      "\u2028",
      "😀",
      "\0",
    ]
  ),
  max_size=20,
).map("".join)


@given(text=TEXT | CODE)
@example("▁ ▁▁  ▁")
@example(" leading and trailing  ")
def test_sentencepiece_round_trip_is_exact(trained, text):
  ids = trained.encode(text)
  assert trained.decode(ids) == text
  assert trained.encode_batch([text]) == [ids]
  assert not set(ids) & set(trained.special_tokens.values())
  assert trained.unk_id not in ids


def test_real_text_round_trips_and_is_compressed(trained, source_texts):
  ids = trained.encode_batch(source_texts, bos=True, eos=True)
  for text, row in zip(source_texts, ids, strict=True):
    assert row[0] == trained.bos_id and row[-1] == trained.eos_id
    assert trained.decode(row) == text
  # Indentation alone makes code compressible; bytes would give 1.0.
  assert sum(map(len, source_texts)) / sum(map(len, ids)) > 2


def test_control_tokens_only_when_asked(trained):
  text = "<|user|>hi<|end|></s>"
  plain = trained.encode(text)
  special = trained.encode(text, allow_special=True)
  user, end = (trained.special_tokens[t] for t in ("<|user|>", "<|end|>"))
  assert special == [user, *trained.encode("hi"), end, trained.eos_id]
  assert not set(plain) & {user, end, trained.eos_id}
  assert trained.decode(plain) == text
  assert trained.decode(special) == "hi"
  assert trained.decode(special, skip_special=False) == text
  assert trained.id_to_piece(user) == "<|user|>"


def test_control_tokens_never_come_from_text_that_is_full_of_them(tmp_path):
  texts = ["<|user|> what <|end|> <|user|> why <|end|> and how"] * 200
  model = tokenizer.train_sentencepiece(
    texts, tmp_path / "m.model", vocab_size=308
  )
  ids = model.encode(texts[0])
  assert not set(ids) & set(model.special_tokens.values())
  assert model.decode(ids) == texts[0]


def test_training_is_deterministic(tmp_path, source_texts):
  models = [
    tokenizer.train_sentencepiece(
      source_texts[:20], tmp_path / f"{i}.model", vocab_size=500
    )
    for i in range(2)
  ]
  assert models[0].fingerprint == models[1].fingerprint
  blobs = [(tmp_path / f"{i}.model").read_bytes() for i in range(2)]
  assert blobs[0] == blobs[1]
  assert models[0].fingerprint == hashlib.sha256(blobs[0]).hexdigest()[:16]
  other = tokenizer.train_sentencepiece(
    source_texts[:20], tmp_path / "other.model", vocab_size=501
  )
  assert other.fingerprint != models[0].fingerprint


def test_training_reads_no_more_than_asked(tmp_path):
  read = []

  def texts():
    for i in range(100):
      read.append(i)
      yield f"some words {i} and more of them\n" * 10

  tokenizer.train_sentencepiece(
    texts(), tmp_path / "m.model", vocab_size=320, max_bytes=3000
  )
  assert len(read) == 10  # of about 320 bytes each


def test_training_errors(tmp_path):
  path = tmp_path / "m.model"
  with pytest.raises(ValueError, match="no text"):
    tokenizer.train_sentencepiece([], path, vocab_size=300)
  with pytest.raises(ValueError, match="vocab_size=5000.*smaller vocab_size"):
    tokenizer.train_sentencepiece(["too little text"], path, vocab_size=5000)
  assert not path.exists()


def test_load_errors(tmp_path):
  with pytest.raises(ValueError, match="does not exist"):
    tokenizer.load(tmp_path / "no.model")
  with pytest.raises(ValueError, match="neither tokenizer.json nor"):
    tokenizer.load(tmp_path)
  (tmp_path / "bad.model").write_bytes(b"not a model")
  with pytest.raises(ValueError, match="not a SentencePiece model"):
    tokenizer.load(tmp_path / "bad.model")
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match="not a tokenizer.json"):
    tokenizer.load(tmp_path)


@pytest.mark.parametrize(
  "extra, fits", [(0, True), (24, True), (-1, False), (31_000, False)]
)
def test_check_vocab(trained, extra, fits):
  if fits:
    tokenizer.check_vocab(trained, 1000 + extra)
    return
  with pytest.raises(ValueError, match="1000 tokens but model.vocab_size="):
    tokenizer.check_vocab(trained, 1000 + extra)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory, source_texts):
  """A byte-level BPE folder as Hugging Face writes it."""
  import tokenizers

  folder = tmp_path_factory.mktemp("hf")
  model = tokenizers.ByteLevelBPETokenizer()
  model.train_from_iterator(
    source_texts[:20],
    vocab_size=500,
    show_progress=False,
    special_tokens=["<s>", "</s>", "<|user|>"],
  )
  model.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(
    json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
  )
  return tokenizer.load(folder)


@given(text=TEXT | CODE)
def test_hugging_face_round_trip(hugging_face, text):
  ids = hugging_face.encode(text)
  assert hugging_face.decode(ids) == text
  assert hugging_face.encode_batch([text]) == [ids]
  assert not set(ids) & set(hugging_face.special_tokens.values())


def test_hugging_face_special_tokens(hugging_face):
  assert (hugging_face.bos_id, hugging_face.eos_id) == (0, 1)
  assert hugging_face.pad_id is None
  ids = hugging_face.encode("<|user|>x", allow_special=True, bos=True)
  assert ids == [0, 2, *hugging_face.encode("x")]
  assert hugging_face.decode(ids) == "x"
  assert hugging_face.decode(ids, skip_special=False) == "<s><|user|>x"
  with pytest.raises(ValueError, match="not in the vocabulary"):
    hugging_face.id_to_piece(10_000)


def test_missing_bos_is_an_error(tmp_path, hugging_face):
  (tmp_path / "tokenizer.json").write_text(hugging_face._json)
  bare = tokenizer.load(tmp_path)
  with pytest.raises(ValueError, match="no BOS token"):
    bare.encode("x", bos=True)


def test_smollm2(shared_data):
  smollm2 = tokenizer.load(shared_data / "smollm2_tokenizer")
  assert smollm2.vocab_size == 49_152
  assert (smollm2.bos_id, smollm2.eos_id, smollm2.pad_id) == (1, 2, 2)
  assert smollm2.encode("a  5") == [81, 256, 37]


@pytest.mark.parametrize("name", ["mistral_v1_spm32k", "spm_test_ja"])
def test_foreign_sentencepiece_encodes_as_the_library_does(shared_data, name):
  import sentencepiece

  path = shared_data / "tokenizers" / f"{name}.model"
  library = sentencepiece.SentencePieceProcessor(model_file=str(path))
  ours = tokenizer.load(path)
  for text in ("Hello  world", "日本語 text", "a▁b"):
    assert ours.encode(text) == library.encode(text)
