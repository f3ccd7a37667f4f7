"""The step of a small pretraining run, for the compiler alone."""

from jax.sharding import Mesh

from data.config import DataConfig
from model.config import ModelConfig
from train import pretrain
from train.config import OptimizerConfig, StepConfig
from train.program import Program
from train.run_config import PretrainConfig


def make(
  model: ModelConfig,
  mesh: Mesh,
  rows: int,
  *,
  seq_len: int | None = None,
  optimizer: OptimizerConfig = OptimizerConfig(),
  **step,
) -> Program:
  """A run's step on a mesh, whose devices need not be here.

  Args:
    model: what is trained.
    mesh: where.
    rows: of a batch.
    seq_len: of a row; None: the longest that the model knows.
    optimizer: updates.
    **step: fields of `StepConfig`.
  """
  data = DataConfig(
    sources=(),
    tokenizer="",
    seq_len=seq_len or model.max_positions,
    global_batch_size=rows,
  )
  config = PretrainConfig(
    model=model,
    data=data,
    num_steps=100,
    optimizer=optimizer,
    step=StepConfig(**step),
  )
  return pretrain.program(config, mesh)
