"""Pretraining on a laptop: a decoder of 2 M parameters, minutes on a CPU.

python -m data.prepare --config=configs/prepare_stdlib.py --workdir=runs/stdlib
python -m train.pretrain --config=configs/pretrain_tiny.py --workdir=runs/tiny
python -m train.report runs/tiny
"""

from data.config import DataConfig, TokenSource
from model.config import ModelConfig, Rope
from sharding.axes import MeshConfig
from train.config import CheckpointConfig, MonitorConfig, ScheduleConfig
from train.run_config import HeldOutConfig, PretrainConfig


def get_config() -> PretrainConfig:
  """A Llama with QK-norm; all devices hold a copy of it."""
  return PretrainConfig(
    model=ModelConfig(
      vocab_size=4096,
      num_layers=4,
      embed_dim=160,
      num_heads=5,
      num_kv_heads=5,
      head_dim=32,
      mlp_dim=448,
      max_positions=512,
      rope=Rope(theta=10_000.0),
      qk_norm=True,
      tied=True,
      embed_scale=160**0.5,
    ),
    data=DataConfig(
      sources=(TokenSource(path="runs/stdlib/train"),),
      tokenizer="runs/stdlib/tokenizer.model",
      seq_len=256,
      global_batch_size=8,
    ),
    num_steps=600,
    held_out=HeldOutConfig(path="runs/stdlib/heldout", num_batches=16),
    mesh=MeshConfig(data=-1, fsdp=1),
    # The 2e-4 that is right for billions of parameters (the default) is far
    # too small for two million and a short run.
    schedule=ScheduleConfig(kind="wsd", peak=3e-3, final_ratio=0.0),
    checkpoint=CheckpointConfig(every=200),
    monitor=MonitorConfig(eval_every=100),
  )
