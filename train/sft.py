"""Supervised fine-tuning: conversations, with the loss on the answers only.

  python -m train.sft --config=configs/sft_tiny.py --workdir=DIR

A run that was stopped continues when it is started again with the same
workdir. `run` is the same for notebooks.
"""

import dataclasses
import json
from typing import Any

from configs import cli
from train.run_config import Result, SFTConfig, check_length


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
  from model.transformer import Transformer
  from sharding.arrays import check_batch_size, process_rows, to_global
  from sharding.mesh import make_mesh
  from train import assembly, checkpoint, initial
  from train.loop import fit
  from train.objective import lm_loss
  from train.optimizers import make_optimizer
  from train.schedules import make_schedule
  from train.state import abstract_state, shardings_of, state_from_model
  from train.step import make_eval_step, make_train_step

  folder = assembly.open_run(
    workdir,
    json.dumps(cli.to_dict(config), indent=2),
    compilation_cache=config.compilation_cache,
    distributed=config.distributed,
  )

  # ---- Devices ----
  mesh, rules = make_mesh(config.mesh), config.rules
  execution = assembly.make_execution(config.step, mesh, rules)

  # ---- Model: the one to start from says what it is ----
  if model is None:
    model = initial.load_model(config.init_from, mesh=mesh, rules=rules)
  model_config = model.config
  make_model = lambda rngs: Transformer(model_config, rngs=rngs)

  # ---- Data ----
  data = config.data
  check_length(data.seq_len, model_config)
  check_batch_size(
    data.global_batch_size, mesh, rules, accumulation=config.step.accumulation
  )
  tokenizer = tokenizer_lib.load(data.tokenizer)
  tokenizer_lib.check_vocab(tokenizer, model_config.vocab_size)
  rows = process_rows(data.global_batch_size, mesh, rules)
  batches = open_loader(data, tokenizer, rows=rows)
  if config.num_steps is None:
    per_epoch = sum(batches.num_rows) / data.global_batch_size
    num_steps = max(1, round(config.num_epochs * per_epoch))
    config = dataclasses.replace(config, num_steps=num_steps)

  # ---- Step ----
  optimizer = make_optimizer(
    config.optimizer, make_schedule(config.schedule, config.num_steps)
  )
  placed = {
    "mesh": mesh,
    "rules": rules,
    "zero_stage": config.step.zero_stage,
    "compression": config.step.compression,
  }
  abstract = abstract_state(make_model, optimizer, **placed)
  shardings = shardings_of(abstract)
  train_step = make_train_step(
    lm_loss(),
    optimizer,
    execution,
    shardings,
    accumulation=config.step.accumulation,
    zero_stage=config.step.zero_stage,
    compression=config.step.compression,
  )
  evaluate = assembly.make_held_out(
    config.held_out,
    tokenizer,
    make_eval_step(lm_loss(), execution, shardings.model),
    seq_len=data.seq_len,
    global_batch_size=data.global_batch_size,
    overlong=data.overlong,
    execution=execution,
  )

  # ---- State: where the run stopped, or a start ----
  restored = checkpoint.restore_latest(
    folder / "checkpoints",
    abstract,
    config={"model": dataclasses.asdict(model_config)},
  )
  if restored is not None:
    state = restored.state
  else:
    state = state_from_model(model, optimizer, seed=config.seed, **placed)
  del restored, model

  # ---- Train ----
  state, history = fit(
    state,
    train_step,
    batches,
    config=config,
    workdir=folder,
    place=lambda batch: to_global(batch, mesh, rules),
    evaluate=evaluate,
    **assembly.utilisation(model_config, batches, execution),
    label="sft",
  )
  return Result(state=state, history=history)


if __name__ == "__main__":
  cli.launch(run, SFTConfig)
