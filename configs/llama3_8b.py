"""Llama 3 8B from scratch on TPUs, rows of 8192 tokens.

  python -m plan.dryrun --config=configs/llama3_8b.py:v5p-64 \
    --topology=v5p:4x4x4
  python -m train.pretrain --config=configs/llama3_8b.py:v5p-64 \
    --workdir=runs/llama3_8b

Source: The Llama 3 Herd of Models (arXiv:2407.21783): table 3 (learning rate
3e-4), section 3.4.1 (4 M tokens a step at first; what it says of the 405B
model's schedule, 8000 steps of warm-up and a cosine to a hundredth, is taken
over). 240,000 steps are 1 T tokens.

Not run here for want of the machines: these are settings, not results. By
`plan.dryrun` (jax 0.12), of a chip: "v5p-64" 61.7 of 95.7 GiB, 11.54 s a step
of 65,536 tokens as it is scheduled, MFU 63.7 % with the mask counted exactly.
"""

from typing import Literal

from data.config import DataConfig, TokenSource
from model.families.llama import llama3_8b
from sharding.axes import MeshConfig
from train.config import (
  CheckpointConfig,
  MonitorConfig,
  OptimizerConfig,
  ScheduleConfig,
  StepConfig,
)
from train.run_config import HeldOutConfig, PretrainConfig

_MESHES = {
  # Over all 64 chips of a cube the compiler gathers by all-reduces.
  "v5p-64": (
    MeshConfig(data=4, fsdp=16),
    StepConfig(remat="dots", accumulation=4),
  ),
}


def get_config(
  variant: Literal["v5p-64"] = "v5p-64",
) -> PretrainConfig:
  """The run; "v5p-64" is a slice of 4x4x4 chips."""
  mesh, step = _MESHES[variant]
  return PretrainConfig(
    model=llama3_8b(),
    data=DataConfig(
      sources=(TokenSource(path="runs/corpus/train"),),
      tokenizer="runs/corpus/tokenizer.json",
      seq_len=8192,
      global_batch_size=512,
      packing="concat",
    ),
    num_steps=240_000,
    held_out=HeldOutConfig(path="runs/corpus/heldout", num_batches=16),
    mesh=mesh,
    schedule=ScheduleConfig(
      kind="cosine", peak=3e-4, warmup_steps=8000, final_ratio=0.01
    ),
    optimizer=OptimizerConfig(weight_decay=0.1, clip_norm=1.0),
    step=step,
    checkpoint=CheckpointConfig(every=1000, keep=3),
    monitor=MonitorConfig(log_every=10, eval_every=2000),
  )
