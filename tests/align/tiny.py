"""A tiny model, tokenizer, pairs and run config for tests of align/."""

import json
import pathlib

from flax import nnx

from align.config import DPOConfig, PairsConfig
from data import tokenizer as tokenizer_lib
from model.config import ModelConfig, Rope
from model.transformer import Transformer
from sharding.axes import MeshConfig
from train.config import (
  CheckpointConfig,
  MonitorConfig,
  OptimizerConfig,
  ScheduleConfig,
  StepConfig,
)

VOCAB = 320
MODEL = ModelConfig(
  vocab_size=VOCAB,
  num_layers=2,
  embed_dim=24,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  mlp_dim=40,
  max_positions=48,
  rope=Rope(theta=1e4),
)
WORDS = ("north", "south", "east", "west", "up", "down")


def model(seed: int = 0) -> Transformer:
  """Random weights."""
  return Transformer(MODEL, rngs=nnx.Rngs(seed))


def lines(count: int = 24) -> list[dict]:
  """Pairs with a rule: the right answer is always north."""
  return [
    {
      "id": f"pair-{i}",
      "prompt": f"go {WORDS[i % 6]}",
      "chosen": "north",
      "rejected": WORDS[1 + i % 5],
    }
    for i in range(count)
  ]


def write(path: pathlib.Path, records: list[dict]) -> str:
  """Writes JSONL."""
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  return str(path)


def tokenizer(folder: pathlib.Path) -> str:
  """Trains a tokenizer on the words; returns its path."""
  path = folder / "tokenizer.model"
  if not path.exists():
    text = " ".join(f"go {word} then go" for word in WORDS)
    tokenizer_lib.train_sentencepiece([text] * 4, path, vocab_size=VOCAB)
  return str(path)


def config(folder: pathlib.Path, **changes) -> DPOConfig:
  """A run of seconds on two devices."""
  data = PairsConfig(
    path=write(folder / "pairs.jsonl", lines()),
    held_out=write(folder / "held_out.jsonl", lines(7)),
    tokenizer=tokenizer(folder),
    seq_len=32,
    global_batch_size=4,
  )
  values = {
    "init_from": "unused",
    "data": data,
    "num_steps": 6,
    "mesh": MeshConfig(data=2, fsdp=1),
    "schedule": ScheduleConfig(kind="constant", peak=1e-2, warmup_steps=0),
    # What is compared is float32, and with eps 1e-8 AdamW makes steps of the
    # rounding of gradients near 0.
    "step": StepConfig(precision="float32"),
    "optimizer": OptimizerConfig(eps=1e-4),
    "checkpoint": CheckpointConfig(every=3),
    "monitor": MonitorConfig(log_every=1, eval_every=3, tensorboard=False),
  }
  return DPOConfig(**values | changes)
