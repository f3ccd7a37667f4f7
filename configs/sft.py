"""Supervised fine-tuning with the settings that the articles name.

The conversations are one JSON object a line, {"messages": [{"role": "user",
"content": ...}, {"role": "assistant", "content": ...}]}, in chat.jsonl:

  python -m data.prepare --config=configs/sft.py:data --workdir=runs/chat
  python -m train.sft --config=configs/sft.py --workdir=runs/sft \
    --config.init_from=runs/tiny --config.data.seq_len=256

"The lifecycle of a large model", table of SFT settings: learning rate 2e-5
(10 to 100 times below pretraining), 1 to 3 epochs, 2048 to 4096 tokens,
batches of 128 to 512 conversations by accumulation.
"""

from typing import Literal

from data.config import DataConfig, PrepareConfig, Source, TokenSource
from sharding.axes import MeshConfig
from train.config import (
  SFT_LEARNING_RATE,
  CheckpointConfig,
  MonitorConfig,
  OptimizerConfig,
  ScheduleConfig,
  StepConfig,
)
from train.run_config import HeldOutConfig, SFTConfig

_TOKENIZER = "runs/stdlib/tokenizer.model"


def get_config(
  variant: Literal["train", "data"] = "train",
) -> SFTConfig | PrepareConfig:
  """The run, or the preparation of its conversations."""
  if variant == "data":
    return PrepareConfig(
      sources=(Source(path="chat.jsonl", format="chat"),),
      heldout_fraction=0.05,
      tokenizer=_TOKENIZER,
    )
  return SFTConfig(
    init_from="runs/pretrain",
    data=DataConfig(
      sources=(TokenSource(path="runs/chat/train"),),
      tokenizer=_TOKENIZER,
      seq_len=2048,
      global_batch_size=128,
      overlong="drop",
    ),
    num_epochs=2,
    held_out=HeldOutConfig(path="runs/chat/heldout"),
    mesh=MeshConfig(fsdp=-1),
    schedule=ScheduleConfig(
      kind="cosine", peak=SFT_LEARNING_RATE, warmup_fraction=0.03
    ),
    optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
    step=StepConfig(accumulation=4),
    checkpoint=CheckpointConfig(every=100),
    monitor=MonitorConfig(eval_every=50),
  )
