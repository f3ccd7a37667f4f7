"""The whole demo in miniature: it runs, judges and reports."""

import json

import pytest

from examples.demo.__main__ import run
from examples.demo.configs import Sizes

SIZES = Sizes(
  vocab_size=700,
  num_layers=2,
  embed_dim=32,
  head_dim=16,
  mlp_dim=64,
  seq_len=128,
  batch_size=8,
  pretrain_steps=30,
  sft_steps=20,
  dpo_steps=20,
  max_files=80,
  corpus_chars=200_000,
)


@pytest.mark.slow
def test_miniature(tmp_path):
  gates = run(str(tmp_path / "demo"), SIZES)
  # So few steps prove little, but a tuned model fits answers better.
  assert len(gates) == 5
  assert "SFT < base" in gates[1].claim and gates[1].passed
  page = (tmp_path / "demo" / "report.html").read_text()
  for text in ("Pretraining", "SFT", "DPO", *(g.claim for g in gates)):
    assert text.replace("<", "&lt;").replace(">", "&gt;") in page
  for name in ("pretrain", "sft", "dpo"):
    lines = (tmp_path / "demo" / name / "metrics.jsonl").read_text()
    assert json.loads(lines.splitlines()[-1])["loss"] > 0
