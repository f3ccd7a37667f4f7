"""The loops whose step can be compiled without a run: one table.

A loop's module has `program(config, mesh)`, or `program(config, model, mesh)`
where the model is that of `config.init_from`. Imports no JAX.
"""

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from align.config import DPOConfig
from data.config import DataConfig
from model.config import ModelConfig
from train.run_config import PretrainConfig, SFTConfig, check_length

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from train.program import Program


@dataclasses.dataclass(frozen=True)
class Loop:
  """A loop.

  Attributes:
    config_class: of its runs.
    module: that has `program`.
    rows: of a batch, an example.
    trains: whether it has a state that changes.
  """

  config_class: type
  module: str
  rows: int = 1
  trains: bool = True

  def model(self, config: Any) -> ModelConfig:
    """The shape of a run's model; no weights are read.

    Raises:
      ValueError: `config.init_from` is no model, or one too short for the rows.
    """
    if hasattr(config, "model"):
      return config.model
    from train.initial import load_config

    model = load_config(config.init_from)
    check_length(config.data.seq_len, model)
    return model

  def program(self, config: Any, model: ModelConfig, mesh: "Mesh") -> "Program":
    """The loop's own step on a mesh.

    Args:
      config: of the run.
      model: of `self.model`.
      mesh: its devices, which may be those of a topology that is not here.

    Raises:
      ValueError: what the loop would refuse.
    """
    make = importlib.import_module(self.module).program
    if config.num_steps is None:
      # As long as the data, which are not here. Nothing but constants of the
      # learning rate's schedule hangs on it.
      config = dataclasses.replace(config, num_steps=1000)
    if hasattr(config, "model"):
      return make(config, mesh)
    return make(config, model, mesh)

  def as_pretraining(self, config: Any, model: ModelConfig) -> PretrainConfig:
    """A pretraining run whose step has the same rows, state and settings."""
    return PretrainConfig(
      model=model,
      data=DataConfig(
        sources=(),
        tokenizer="",
        seq_len=config.data.seq_len,
        global_batch_size=self.rows * config.data.global_batch_size,
      ),
      num_steps=config.num_steps or 1000,
      mesh=config.mesh,
      rules=config.rules,
      optimizer=config.optimizer,
      step=config.step,
    )


LOOPS = {
  "pretrain": Loop(PretrainConfig, "train.pretrain"),
  "sft": Loop(SFTConfig, "train.sft"),
  "dpo": Loop(DPOConfig, "align.dpo", rows=2),
  "generate": Loop(PretrainConfig, "plan.generation", trains=False),
}
