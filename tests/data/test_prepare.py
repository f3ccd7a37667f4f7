"""The whole way from files to stores, and what stops it."""

import json
import subprocess
import sys

import numpy as np
import pytest

from data import prepare, split
from data.config import PrepareConfig, Source
from data.tokenized import TokenStore

TALK = [
  {"role": "user", "content": "How many?"},
  {"role": "assistant", "content": "Three."},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, source_texts):
  folder = tmp_path_factory.mktemp("corpus")
  for i, text in enumerate(source_texts[:40]):
    (folder / f"{i:02d}.txt").write_text(text)
  (folder / "40.txt").write_text(source_texts[3].upper())
  (folder / "41.txt").write_text(source_texts[4] + "\nchanged = True\n")
  (folder / "42.txt").write_text("short")
  return folder


def settings(corpus, **changes):
  return PrepareConfig(
    **{
      "sources": (Source(path=f"{corpus}/*.txt", format="text"),),
      "heldout_fraction": 0.2,
      "vocab_size": 600,
    }
    | changes
  )


def test_text_becomes_stores(tmp_path, corpus):
  config = settings(corpus)
  prepared = prepare.run(config, tmp_path / "run")
  reports = {report.stage: report for report in prepared.reports}
  removed = [r.removed for s, r in reports.items() if s != "split"]
  removed = {
    i for by_reason in removed for ids in by_reason.values() for i in ids
  }
  assert {"40.txt", "41.txt", "42.txt"} <= removed
  # Every document is in one store or in one report.
  in_stores = {}
  for name, store in (("train", prepared.train), ("heldout", prepared.heldout)):
    for i in range(len(store)):
      in_stores[store.id(i)] = name
      text = prepared.tokenizer.decode(
        store.tokens[store.offsets[i] : store.offsets[i + 1]]
      )
      assert text == (corpus / store.id(i)).read_text()
      assert store.num_bytes[i] == len(text.encode())
      tokens = store.tokens[store.offsets[i] : store.offsets[i + 1]]
      assert tokens[0] == prepared.tokenizer.bos_id
      assert tokens[-1] == prepared.tokenizer.eos_id
  assert set(in_stores) | removed == {f"{i:02d}.txt" for i in range(43)}
  assert not set(in_stores) & removed
  for name, part in in_stores.items():
    assert (part == "heldout") == split.is_heldout(name, fraction=0.2)
  record = json.loads((tmp_path / "run" / "prepare.json").read_text())
  assert record["config"]["vocab_size"] == 600
  assert [r["stage"] for r in record["reports"]] == list(reports)


def test_the_same_bytes_again(tmp_path, corpus):
  for name in ("a", "b"):
    prepare.run(settings(corpus), tmp_path / name)
  files = [p for p in (tmp_path / "a").rglob("*") if p.is_file()]
  assert len(files) > 10
  for path in files:
    other = tmp_path / "b" / path.relative_to(tmp_path / "a")
    assert path.read_bytes() == other.read_bytes()


def test_conversations_are_masked(tmp_path, trained, corpus):
  text = prepare.run(settings(corpus, heldout_fraction=0.0), tmp_path / "text")
  assert text.heldout is None
  path = tmp_path / "talk.jsonl"
  long = [TALK[0], {"role": "assistant", "content": "long " * 100}]
  path.write_text(
    "\n".join(
      json.dumps({"id": i, "messages": m})
      for i, m in (("a", TALK), ("copy", TALK), ("long", long))
    )
  )
  prepared = prepare.run(
    PrepareConfig(
      sources=(Source(path=str(path), format="chat"),),
      heldout_fraction=0.0,
      tokenizer=str(tmp_path / "text" / "tokenizer.model"),
      max_tokens=50,
    ),
    tmp_path / "chat",
  )
  store, tok = prepared.train, prepared.tokenizer
  assert tok.fingerprint == text.tokenizer.fingerprint
  assert [store.id(i) for i in range(len(store))] == ["a"]
  learnt = np.asarray(store.tokens)[np.asarray(store.mask, bool)]
  assert tok.decode(learnt, skip_special=False) == "Three.<|end|>"
  assert (tmp_path / "chat" / "tokenizer.model").is_file()
  assert "generation" in (tmp_path / "chat" / "chat_template.jinja").read_text()
  assert prepared.reports[-1].removed == {"longer than 50 tokens": ["long"]}


def test_errors(tmp_path, corpus):
  with pytest.raises(ValueError, match="sources is empty"):
    prepare.run(PrepareConfig(sources=()), tmp_path / "a")
  chat = Source(path=f"{corpus}/*.txt", format="chat")
  with pytest.raises(ValueError, match="mix format='chat' with texts"):
    prepare.run(
      settings(corpus, sources=(*settings(corpus).sources, chat)), tmp_path
    )
  twice = settings(corpus).sources * 2
  with pytest.raises(ValueError, match="two documents have the id '00.txt'"):
    prepare.run(settings(corpus, sources=twice), tmp_path / "b")
  (tmp_path / "c" / "train").mkdir(parents=True)
  with pytest.raises(ValueError, match="train' exists"):
    prepare.run(settings(corpus), tmp_path / "c")
  (tmp_path / "short.txt").write_text("short")
  short = (Source(path=str(tmp_path / "short.txt"), format="text"),)
  with pytest.raises(ValueError, match="no document is left(.*\n)+.*short"):
    prepare.run(settings(corpus, sources=short), tmp_path / "d")
  path = tmp_path / "talk.jsonl"
  path.write_text(json.dumps({"id": "x", "messages": TALK}))
  with pytest.raises(ValueError, match="conversations need the tokenizer"):
    prepare.run(
      PrepareConfig(
        sources=(Source(path=str(path), format="chat"),), heldout_fraction=0.0
      ),
      tmp_path / "e",
    )


def test_conversation_that_cannot_be_learnt_from_is_named(tmp_path, corpus):
  prepare.run(settings(corpus), tmp_path / "text")
  path = tmp_path / "talk.jsonl"
  path.write_text(json.dumps({"id": "x", "messages": TALK[:1]}))
  with pytest.raises(ValueError, match="x: the assistant mask is empty"):
    prepare.run(
      PrepareConfig(
        sources=(Source(path=str(path), format="chat"),),
        heldout_fraction=0.0,
        tokenizer=str(tmp_path / "text" / "tokenizer.model"),
      ),
      tmp_path / "chat",
    )


def test_command_line(tmp_path, corpus):
  config = tmp_path / "config.py"
  config.write_text(
    "from data.config import PrepareConfig, Source\n"
    "def get_config():\n"
    "  return PrepareConfig(sources=(Source(\n"
    f"    path={str(corpus / '*.txt')!r}, format='text'),))\n"
  )
  ran = subprocess.run(
    [
      sys.executable,
      "-m",
      "data.prepare",
      f"--config={config}",
      f"--workdir={tmp_path / 'run'}",
      "--config.vocab_size=500",
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  assert ran.returncode == 0, ran.stderr
  assert "exact duplicates:" in ran.stdout
  assert TokenStore(tmp_path / "run" / "train").vocab_size == 500


def test_data_imports_no_jax():
  code = (
    "import sys, data.prepare, data.loader, data.chat, data.tokenizer\n"
    "assert 'jax' not in sys.modules, 'jax'"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
