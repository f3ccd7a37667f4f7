"""A whole pretraining run that takes seconds: text, tokenizer, store, config.

Run as a program, it is the process that tests kill:

  python tests/train/tiny_run.py FOLDER WORKDIR [KEY=VALUE ...]
"""

import pathlib
import sys

from configs import cli
from data import tokenized, tokenizer
from data.config import DataConfig, TokenSource
from model.config import ModelConfig, Rope
from sharding.axes import MeshConfig
from train.config import (
  CheckpointConfig,
  MonitorConfig,
  ScheduleConfig,
  StepConfig,
)
from train.run_config import HeldOutConfig, PretrainConfig

NUM_STEPS = 30
TEXT = "to be or not that is the question whether tis nobler in mind"


def write_data(folder: pathlib.Path) -> None:
  """A tokenizer and two stores, of 90 and 7 little documents."""
  texts = [
    " ".join(
      f"{word}{(i * k) % 23}"
      for k, word in enumerate(TEXT.split()[: 4 + i % 9])
    )
    for i in range(97)
  ]
  tok = tokenizer.train_sentencepiece(
    texts, folder / "tokenizer.model", vocab_size=320
  )
  for name, part in {"train": texts[:90], "held_out": texts[90:]}.items():
    examples = [
      tokenized.Example(
        f"{name}-{i}",
        tok.encode(text, bos=True, eos=True),
        num_bytes=len(text.encode()),
      )
      for i, text in enumerate(part)
    ]
    tokenized.write(
      folder / name,
      examples,
      vocab_size=tok.vocab_size,
      fingerprint=tok.fingerprint,
    )


def config(folder: pathlib.Path) -> PretrainConfig:
  """Two devices, dropout on, a checkpoint every 4 steps."""
  return PretrainConfig(
    model=ModelConfig(
      vocab_size=320,
      num_layers=2,
      embed_dim=32,
      num_heads=4,
      num_kv_heads=2,
      head_dim=8,
      mlp_dim=48,
      max_positions=64,
      rope=Rope(theta=1e4),
      residual_dropout=0.1,
    ),
    data=DataConfig(
      sources=(TokenSource(path=str(folder / "train")),),
      tokenizer=str(folder / "tokenizer.model"),
      seq_len=40,
      global_batch_size=4,
      prefetch_batches=2,
    ),
    num_steps=NUM_STEPS,
    held_out=HeldOutConfig(path=str(folder / "held_out")),
    mesh=MeshConfig(data=2, fsdp=1),
    schedule=ScheduleConfig(kind="constant", peak=1e-2, warmup_steps=3),
    step=StepConfig(precision="float32"),
    checkpoint=CheckpointConfig(every=4, keep=2),
    monitor=MonitorConfig(log_every=3, eval_every=10, tensorboard=False),
    compilation_cache=str(folder / "compiled"),
  )


def main(folder: str, workdir: str, *settings: str) -> None:
  """Trains, and writes each batch's documents to WORKDIR/documents.txt."""
  from data.loader import Loader
  from train import pretrain

  iterate = Loader.iterate

  def spy(self, start_step=0):
    for step, batch, document_ids in iterate(self, start_step):
      if self.num_batches is None:  # The training data, not the held-out.
        with open(pathlib.Path(workdir) / "documents.txt", "a") as file:
          file.write(f"{step} {document_ids}\n")
      yield step, batch, document_ids

  Loader.iterate = spy
  overrides = dict(setting.split("=") for setting in settings)
  pretrain.run(cli.override(config(pathlib.Path(folder)), overrides), workdir)


if __name__ == "__main__":
  main(*sys.argv[1:])
