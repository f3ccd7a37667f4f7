"""The sizes of the demo, and the configs of its three trainings.

Tuned for one thing: the best model that two CPU cores make in a few minutes.
With so few tokens every step counts: small batches, and learning rates ten
times those of large models.
"""

import dataclasses
import pathlib

from align.config import DPOConfig, PairsConfig
from data.config import DataConfig, PrepareConfig, Source, TokenSource
from model.config import ModelConfig, Rope
from sharding.axes import MeshConfig
from train.config import (
  CheckpointConfig,
  MonitorConfig,
  OptimizerConfig,
  ScheduleConfig,
  StepConfig,
)
from train.run_config import HeldOutConfig, PretrainConfig, SFTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """What is traded between time and quality.

  Attributes:
    vocab_size: pieces of the tokenizer.
    num_layers: L.
    embed_dim: D.
    head_dim: H.
    mlp_dim: F.
    seq_len: T, of pretraining and SFT.
    pair_len: T of pairs: one question and answer.
    batch_size: rows a step, of pretraining.
    pretrain_steps: updates.
    sft_steps: updates.
    dpo_steps: updates.
    corpus_chars: of the documents that pretraining reads, about as much as it
      goes through twice. All documents give questions.
    max_files: files of the corpus; None: all.
    seed: of everything.
  """

  vocab_size: int = 4096
  num_layers: int = 4
  embed_dim: int = 160
  head_dim: int = 32
  mlp_dim: int = 448
  seq_len: int = 256
  pair_len: int = 64
  batch_size: int = 4
  pretrain_steps: int = 900
  sft_steps: int = 450
  dpo_steps: int = 450
  corpus_chars: int = 1_800_000
  max_files: int | None = None
  seed: int = 0


# All devices, each with a copy of the model: it is small.
_MESH = MeshConfig(data=-1, fsdp=1)
_OPTIMIZER = OptimizerConfig()


def corpus(documents: pathlib.Path, sizes: Sizes) -> PrepareConfig:
  """Text: cleaned, without duplicates, a tenth of the documents set aside."""
  return PrepareConfig(
    sources=(Source(path=str(documents)),),
    heldout_fraction=0.1,
    vocab_size=sizes.vocab_size,
    seed=sizes.seed,
  )


def conversations(workdir: pathlib.Path, sizes: Sizes) -> PrepareConfig:
  """Questions with their answers."""
  return PrepareConfig(
    sources=(Source(path=str(workdir / "questions.jsonl"), format="chat"),),
    heldout_fraction=0.0,
    tokenizer=str(workdir / "corpus" / "tokenizer.model"),
    max_tokens=sizes.seq_len + 1,
  )


def pretrain(workdir: pathlib.Path, sizes: Sizes) -> PretrainConfig:
  """Next-token prediction on the corpus."""
  data = workdir / "corpus"
  return PretrainConfig(
    model=ModelConfig(
      vocab_size=sizes.vocab_size,
      num_layers=sizes.num_layers,
      embed_dim=sizes.embed_dim,
      num_heads=sizes.embed_dim // sizes.head_dim,
      num_kv_heads=sizes.embed_dim // sizes.head_dim,
      head_dim=sizes.head_dim,
      mlp_dim=sizes.mlp_dim,
      max_positions=2 * sizes.seq_len,
      rope=Rope(theta=10_000.0),
      qk_norm=True,
      tied=True,
      embed_scale=sizes.embed_dim**0.5,
    ),
    data=DataConfig(
      sources=(TokenSource(path=str(data / "train")),),
      tokenizer=str(data / "tokenizer.model"),
      seq_len=sizes.seq_len,
      global_batch_size=sizes.batch_size,
      seed=sizes.seed,
    ),
    num_steps=sizes.pretrain_steps,
    held_out=HeldOutConfig(
      path=str(data / "heldout"), global_batch_size=16, num_batches=4
    ),
    mesh=_MESH,
    step=StepConfig(unroll=sizes.num_layers),
    schedule=ScheduleConfig(
      kind="wsd", peak=5e-3, decay_fraction=0.4, final_ratio=0.0
    ),
    optimizer=_OPTIMIZER,
    checkpoint=CheckpointConfig(every=sizes.pretrain_steps),
    monitor=MonitorConfig(eval_every=max(1, sizes.pretrain_steps // 5)),
    seed=sizes.seed,
  )


def sft(workdir: pathlib.Path, sizes: Sizes) -> SFTConfig:
  """Answers to questions; the loss is on the answers."""
  return SFTConfig(
    init_from=str(workdir / "pretrain"),
    data=DataConfig(
      sources=(TokenSource(path=str(workdir / "conversations" / "train")),),
      tokenizer=str(workdir / "corpus" / "tokenizer.model"),
      seq_len=sizes.seq_len,
      global_batch_size=sizes.batch_size,
      seed=sizes.seed,
      overlong="drop",
    ),
    num_steps=sizes.sft_steps,
    mesh=_MESH,
    step=StepConfig(unroll=sizes.num_layers),
    schedule=ScheduleConfig(kind="linear", peak=5e-3, final_ratio=0.0),
    optimizer=_OPTIMIZER,
    checkpoint=CheckpointConfig(every=sizes.sft_steps),
    seed=sizes.seed,
  )


def dpo(workdir: pathlib.Path, sizes: Sizes) -> DPOConfig:
  """The right answer against another question's."""
  return DPOConfig(
    init_from=str(workdir / "sft"),
    data=PairsConfig(
      path=str(workdir / "pairs.jsonl"),
      held_out=str(workdir / "held_out_pairs.jsonl"),
      tokenizer=str(workdir / "corpus" / "tokenizer.model"),
      seq_len=sizes.pair_len,
      global_batch_size=2 * sizes.batch_size,
      seed=sizes.seed,
    ),
    beta=0.3,
    num_steps=sizes.dpo_steps,
    reference="live",  # Not every pair comes up.
    mesh=_MESH,
    step=StepConfig(unroll=sizes.num_layers),
    schedule=ScheduleConfig(kind="linear", peak=5e-4, final_ratio=0.0),
    optimizer=_OPTIMIZER,
    checkpoint=CheckpointConfig(every=100_000),
    monitor=MonitorConfig(eval_every=max(1, sizes.dpo_steps // 3)),
    seed=sizes.seed,
  )
