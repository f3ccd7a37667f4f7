"""Pretraining: next-token prediction on packed documents.

  python -m train.pretrain --config=configs/pretrain_tiny.py --workdir=DIR

A run that was stopped continues when it is started again with the same
workdir. `run` is the same for notebooks.
"""

import dataclasses
import json
from typing import TYPE_CHECKING

from configs import cli
from train.run_config import PretrainConfig, Result

if TYPE_CHECKING:  # `--help` must not wait for JAX.
  from jax.sharding import Mesh

  from train.program import Program


def run(config: PretrainConfig, workdir: str) -> Result:
  """Trains, from scratch, from `config.init_from` or from where it stopped.

  Args:
    config: see `train/run_config.py`.
    workdir: the run folder: config.json, metrics.jsonl, TensorBoard events,
      checkpoints/.

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

  # ---- Model and step ----
  step = program(config, mesh)

  # ---- Data ----
  data = config.data
  tokenizer = tokenizer_lib.load(data.tokenizer)
  tokenizer_lib.check_vocab(tokenizer, config.model.vocab_size)
  rows = process_rows(data.global_batch_size, mesh, rules)
  batches = open_loader(data, tokenizer, rows=rows)

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
    folder / "checkpoints", step.abstract, config=dataclasses.asdict(config)
  )
  if restored is not None:
    state = step.arranged(restored.state)
  elif config.init_from is not None:
    model = initial.load_model(config.init_from, mesh=mesh, rules=rules)
    initial.check_same(model.config, config.model, config.init_from)
    state = step.start(model)
    del model
  else:
    state = step.start()
  del restored

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
    **assembly.utilisation(config.model, batches, step.execution),
    label="pretrain",
  )
  return Result(state=state, history=history)


def program(config: PretrainConfig, mesh: "Mesh") -> "Program":
  """Returns the run's step on a mesh.

  Args:
    config: of the run.
    mesh: its devices, which may be those of a topology that is not here.
  """
  from train.objective import lm_loss
  from train.program import make_program

  return make_program(
    config,
    config.model,
    lm_loss(z_loss=config.z_loss),
    mesh=mesh,
    eval_objective=lm_loss(),
  )


if __name__ == "__main__":
  cli.launch(run, PretrainConfig)
