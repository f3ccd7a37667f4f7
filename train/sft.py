"""Supervised fine-tuning: conversations, with the loss on the answers only.

  python -m train.sft --config=configs/sft_tiny.py --workdir=DIR

A run that was stopped continues when it is started again with the same
workdir. `run` is the same for notebooks.
"""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from configs import cli
from model.config import ModelConfig
from train.run_config import Result, SFTConfig, check_length

if TYPE_CHECKING:  # `--help` must not wait for JAX.
  from jax.sharding import Mesh

  from train.program import Program


def run(config: SFTConfig, workdir: str, *, model: Any = None) -> Result:
  """Trains the model of `config.init_from`, or goes on where it stopped.

  Args:
    config: see `train/run_config.py`.
    workdir: the run folder: config.json, metrics.jsonl, TensorBoard events,
      checkpoints/.
    model: a `model.transformer.Transformer` to start from, in place of
      `config.init_from`; it stays valid.

  Raises:
    ValueError: a setting that cannot be, or a checkpoint of another model.
    NonFiniteError: the loss was NaN or infinite.
  """
  # ---- Imports: `--help` must not wait for JAX ----
  from data import tokenizer as tokenizer_lib
  from data.loader import open_loader
  from sharding.arrays import process_rows, to_global
  from sharding.mesh import make_mesh
  from train import assembly, checkpoint, initial
  from train.loop import fit

  folder = assembly.open_run(
    workdir,
    json.dumps(cli.to_dict(config), indent=2),
    compilation_cache=config.compilation_cache,
    distributed=config.distributed,
  )

  # ---- Devices ----
  mesh, rules = make_mesh(config.mesh), config.rules

  # ---- Model: the one to start from says what it is ----
  if model is None:
    model = initial.load_model(config.init_from, mesh=mesh, rules=rules)
  model_config = model.config

  # ---- Data ----
  data = config.data
  check_length(data.seq_len, model_config)
  tokenizer = tokenizer_lib.load(data.tokenizer)
  tokenizer_lib.check_vocab(tokenizer, model_config.vocab_size)
  rows = process_rows(data.global_batch_size, mesh, rules)
  batches = open_loader(data, tokenizer, rows=rows)
  if config.num_steps is None:
    per_epoch = sum(batches.num_rows) / data.global_batch_size
    num_steps = max(1, round(config.num_epochs * per_epoch))
    config = dataclasses.replace(config, num_steps=num_steps)

  # ---- Step ----
  step = program(config, model_config, mesh)
  evaluate = assembly.make_held_out(
    config.held_out,
    tokenizer,
    step.eval_step,
    seq_len=data.seq_len,
    global_batch_size=data.global_batch_size,
    overlong=data.overlong,
    execution=step.execution,
  )

  # ---- State: where the run stopped, or a start ----
  restored = checkpoint.restore_latest(
    folder / "checkpoints",
    step.abstract,
    config={"model": dataclasses.asdict(model_config)},
  )
  if restored is not None:
    state = step.arranged(restored.state)
  else:
    state = step.start(model)
  del restored, model

  # ---- Train ----
  state, history = fit(
    state,
    step.train_step,
    batches,
    config=config,
    workdir=folder,
    place=lambda batch: to_global(batch, mesh, rules),
    evaluate=evaluate,
    natural=step.natural,
    **assembly.utilisation(model_config, batches, step.execution),
    label="sft",
  )
  return Result(state=state, history=history)


def program(config: SFTConfig, model: ModelConfig, mesh: "Mesh") -> "Program":
  """Returns the run's step on a mesh.

  Args:
    config: of the run, with `num_steps`.
    model: shape of the model.
    mesh: its devices, which may be those of a topology that is not here.
  """
  from train.objective import lm_loss
  from train.program import make_program

  return make_program(config, model, lm_loss(), mesh=mesh)


if __name__ == "__main__":
  cli.launch(run, SFTConfig)
