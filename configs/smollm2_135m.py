"""SmolLM2-135M from scratch on TPUs, as its makers trained it.

  python -m train.pretrain --config=configs/smollm2_135m.py:v5e-256 \
    --workdir=runs/smollm2

Source: SmolLM2 (arXiv:2502.02737, section 6: 2 T tokens) and the optimizer
settings in huggingface/smollm, pre-training/smollm1/config_smollm1_135M.yaml:
512 rows of 2048 tokens, AdamW (0.9, 0.95), decay 0.01, clip 1.0, learning rate
3e-3, 2000 steps of warm-up, then constant, linear to 0 in the last fifth.

Not run here for want of the machines: these are settings, not results.
"""

import dataclasses
from typing import Literal

from data.config import DataConfig, TokenSource
from model.families.llama import smollm2_135m
from sharding.axes import MeshConfig
from train.config import (
  CheckpointConfig,
  MonitorConfig,
  OptimizerConfig,
  ScheduleConfig,
  StepConfig,
)
from train.run_config import HeldOutConfig, PretrainConfig

# Its 9 heads and 3 key/value heads divide by no power of two, so `tensor`
# stays 1; 135 M parameters need no more than the state split over a few chips.
_MESHES = {
  "v5e-8": (MeshConfig(fsdp=8), StepConfig(remat="block", accumulation=4)),
  "v5e-256": (MeshConfig(data=32, fsdp=8), StepConfig(remat="dots")),
  "v6e-64": (MeshConfig(data=8, fsdp=8), StepConfig(remat="dots")),
  "cpu": (MeshConfig(fsdp=-1), StepConfig(remat="block")),
}


def get_config(
  variant: Literal["v5e-8", "v5e-256", "v6e-64", "cpu"] = "v5e-8",
) -> PretrainConfig:
  """One run on several machines; "cpu" is one of 4 rows, to try it out."""
  mesh, step = _MESHES[variant]
  config = PretrainConfig(
    model=smollm2_135m(),
    data=DataConfig(
      sources=(TokenSource(path="runs/corpus/train"),),
      tokenizer="runs/corpus/tokenizer.json",
      seq_len=2048,
      global_batch_size=512,
      packing="concat",
    ),
    num_steps=2_000_000,
    held_out=HeldOutConfig(path="runs/corpus/heldout", num_batches=16),
    mesh=mesh,
    schedule=ScheduleConfig(
      kind="wsd",
      peak=3e-3,
      warmup_steps=2000,
      decay_fraction=0.2,
      final_ratio=0.0,
    ),
    optimizer=OptimizerConfig(weight_decay=0.01, clip_norm=1.0),
    step=step,
    checkpoint=CheckpointConfig(every=2000, keep=3),
    monitor=MonitorConfig(log_every=10, eval_every=2000),
  )
  if variant != "cpu":
    return config
  data = dataclasses.replace(config.data, global_batch_size=4)
  return dataclasses.replace(config, data=data)
