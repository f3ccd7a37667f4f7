"""What a whole training run is: a model, its data, its mesh, and the settings.

Imports no JAX. Each main takes one of these; files in `configs/` return them.
"""

import dataclasses
from typing import Any

from data.config import DataConfig
from model.config import ModelConfig
from sharding.axes import MeshConfig, Rules
from sharding.distributed import DistributedConfig
from train.config import (
  SFT_LEARNING_RATE,
  CheckpointConfig,
  MonitorConfig,
  OptimizerConfig,
  ScheduleConfig,
  StepConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
  """What a model is judged on every `monitor.eval_every` steps.

  Attributes:
    path: a token store; None: no evaluation.
    global_batch_size: rows that are evaluated together; None: as many as in
      training.
    num_batches: batches of one evaluation; None: the whole store.
  """

  path: str | None = None
  global_batch_size: int | None = None
  num_batches: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
  """A run of `train/pretrain.py`.

  Attributes:
    model: what is trained.
    data: token stores, as `data.prepare` writes them.
    num_steps: updates.
    held_out: evaluation.
    mesh: devices.
    rules: what the mesh splits.
    schedule: learning rate.
    optimizer: updates.
    step: how a step is computed.
    z_loss: factor of logsumexp ** 2 in the loss; 1e-4 in PaLM
      (arXiv:2204.02311, section 5).
    checkpoint: what is saved.
    monitor: what is written down.
    seed: of weights and dropout; the data has its own.
    init_from: weights to continue from, a run folder or a Hugging Face
      folder of the same `model`; None: new weights.
    compilation_cache: folder that keeps compiled programs between runs.
    distributed: the processes of the run.
  """

  model: ModelConfig
  data: DataConfig
  num_steps: int
  held_out: HeldOutConfig = HeldOutConfig()
  mesh: MeshConfig = MeshConfig()
  rules: Rules = Rules()
  schedule: ScheduleConfig = ScheduleConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  step: StepConfig = StepConfig()
  z_loss: float = 0.0
  checkpoint: CheckpointConfig = CheckpointConfig()
  monitor: MonitorConfig = MonitorConfig()
  seed: int = 0
  init_from: str | None = None
  compilation_cache: str | None = None
  distributed: DistributedConfig = DistributedConfig()

  def __post_init__(self):
    if self.num_steps < 1:
      raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")
    check_length(self.data.seq_len, self.model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig:
  """A run of `train/sft.py`. The model is that of `init_from`.

  Attributes:
    init_from: a run folder, or a Hugging Face folder.
    data: token stores of conversations, with masks: the loss is on what the
      assistant says. `overlong="drop"`: half a conversation teaches nothing.
    num_epochs: passes over the conversations (1 to 3: the articles).
    num_steps: updates, in place of `num_epochs`.
    held_out: evaluation.
    mesh: devices.
    rules: what the mesh splits.
    schedule: learning rate; a tenth to a hundredth of pretraining's.
    optimizer: updates.
    step: how a step is computed.
    checkpoint: what is saved.
    monitor: what is written down.
    seed: of dropout; the data has its own.
    compilation_cache: folder that keeps compiled programs between runs.
    distributed: the processes of the run.
  """

  init_from: str
  data: DataConfig
  num_epochs: int = 3
  num_steps: int | None = None
  held_out: HeldOutConfig = HeldOutConfig()
  mesh: MeshConfig = MeshConfig()
  rules: Rules = Rules()
  schedule: ScheduleConfig = ScheduleConfig(peak=SFT_LEARNING_RATE)
  optimizer: OptimizerConfig = OptimizerConfig()
  step: StepConfig = StepConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  monitor: MonitorConfig = MonitorConfig()
  seed: int = 0
  compilation_cache: str | None = None
  distributed: DistributedConfig = DistributedConfig()

  def __post_init__(self):
    for name in ("num_epochs", "num_steps"):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What a run leaves in memory; the rest is in its folder.

  Attributes:
    state: the last `train.state.TrainState`; `state.model` are the weights.
    history: the lines of metrics.jsonl.
  """

  state: Any
  history: list[dict]


def check_length(seq_len: int, model: ModelConfig) -> None:
  """Refuses rows that are longer than the model's positions."""
  if seq_len > model.max_positions:
    raise ValueError(
      f"data.seq_len={seq_len} is longer than model.max_positions="
      f"{model.max_positions}: lower data.seq_len, or scale the positions with"
      " model.rope.scaling and raise model.max_positions"
    )
