"""What a run on preferences is: the settings of `align/dpo.py`.

Imports no JAX.
"""

import dataclasses
from typing import Literal

from sharding.axes import MeshConfig, Rules
from sharding.distributed import DistributedConfig
from train.config import (
  CheckpointConfig,
  MonitorConfig,
  OptimizerConfig,
  ScheduleConfig,
  StepConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairsConfig:
  """Pairs of answers to one question, one preferred.

  Attributes:
    path: JSONL (a file or a glob), one pair a line: {"prompt": a string or
      a list of messages, "chosen": string, "rejected": string, "id": ...}.
    held_out: the same, for evaluation; None: no evaluation.
    tokenizer: of the model.
    chat_template: Jinja file; None: the one beside `tokenizer`, else
      `data.chat.DEFAULT_TEMPLATE`.
    seq_len: T; pairs of which one side is longer are left out and counted.
    global_batch_size: pairs a step over all hosts; twice as many rows.
    seed: of the order, a function of (seed, step).
    on_bad_line: a line that is no pair is an error, or skipped and counted.
  """

  path: str
  tokenizer: str
  held_out: str | None = None
  chat_template: str | None = None
  seq_len: int = 1024
  global_batch_size: int = 64
  seed: int = 0
  on_bad_line: Literal["error", "skip"] = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig:
  """A run of `align/dpo.py`. The model is that of `init_from`.

  Attributes:
    init_from: a run folder or a Hugging Face folder: where the policy starts,
      and the frozen reference.
    data: pairs.
    beta: how much the policy is held to the reference: 0.1 in
      arXiv:2305.18290, appendix B; the articles name 0.1 to 0.5.
    label_smoothing: share of pairs whose label is taken to be wrong (cDPO).
    reference: "precomputed": the reference scores all pairs before the first
      step and is then gone from memory; "live": it stays, and scores each
      batch as it comes. Both give the same numbers.
    num_epochs: passes over the pairs.
    num_steps: updates, in place of `num_epochs`.
    mesh: devices.
    rules: what the mesh splits.
    schedule: learning rate; 1e-6 in arXiv:2305.18290, appendix B.
    optimizer: updates.
    step: how a step is computed.
    checkpoint: what is saved.
    monitor: what is written down.
    seed: kept with the state; the data has its own.
    compilation_cache: folder that keeps compiled programs between runs.
    distributed: the processes of the run.
  """

  init_from: str
  data: PairsConfig
  beta: float = 0.1
  label_smoothing: float = 0.0
  reference: Literal["precomputed", "live"] = "precomputed"
  num_epochs: int = 1
  num_steps: int | None = None
  mesh: MeshConfig = MeshConfig()
  rules: Rules = Rules()
  schedule: ScheduleConfig = ScheduleConfig(peak=1e-6, warmup_fraction=0.1)
  optimizer: OptimizerConfig = OptimizerConfig()
  step: StepConfig = StepConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  monitor: MonitorConfig = MonitorConfig()
  seed: int = 0
  compilation_cache: str | None = None
  distributed: DistributedConfig = DistributedConfig()

  def __post_init__(self):
    if self.beta <= 0:
      raise ValueError(f"beta must be positive, got {self.beta}")
    if not 0.0 <= self.label_smoothing < 0.5:
      raise ValueError(
        f"label_smoothing must be in [0, 0.5), got {self.label_smoothing}: at"
        " one half both labels would be equally right"
      )
    for name in ("num_epochs", "num_steps"):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
