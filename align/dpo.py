"""DPO: preferences without a reward model (arXiv:2305.18290).

  python -m align.dpo --config=FILE.py --workdir=DIR

A run that was stopped continues when it is started again with the same
workdir. `run` is the same for notebooks.
"""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from align.config import DPOConfig
from configs import cli
from model.config import ModelConfig
from train.run_config import Result, check_length

if TYPE_CHECKING:  # `--help` must not wait for JAX.
  from jax.sharding import Mesh

  from train.program import Program


def run(config: DPOConfig, workdir: str, *, model: Any = None) -> Result:
  """Tunes the model of `config.init_from`, or goes on where it stopped.

  Args:
    config: see `align/config.py`.
    workdir: the run folder: config.json, metrics.jsonl, TensorBoard events,
      checkpoints/.
    model: a `model.transformer.Transformer` to start from, in place of
      `config.init_from`; it stays valid.

  Raises:
    ValueError: a setting that cannot be, or a checkpoint of another model.
    NonFiniteError: the loss was NaN or infinite.
  """
  # ---- Imports: `--help` must not wait for JAX ----
  import jax

  from align import pairs as pairs_lib
  from align.preference import make_evaluate
  from align.reference import make_score, score_pairs, with_scores
  from data import tokenizer as tokenizer_lib
  from sharding.arrays import process_rows, to_global
  from sharding.mesh import make_mesh
  from train import assembly, checkpoint, initial
  from train.loop import fit
  from train.state import shardings_of

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

  # ---- Data: two rows a pair ----
  data = config.data
  check_length(data.seq_len, model_config)
  tokenizer = tokenizer_lib.load(data.tokenizer)
  tokenizer_lib.check_vocab(tokenizer, model_config.vocab_size)
  pairs = pairs_lib.open_pairs(data, data.path, tokenizer)
  held_out = pairs_lib.open_pairs(data, data.held_out, tokenizer)
  if config.num_steps is None:
    num_steps = round(config.num_epochs * len(pairs) / data.global_batch_size)
    config = dataclasses.replace(config, num_steps=max(1, num_steps))

  # ---- Step ----
  step = program(config, model_config, mesh)

  # ---- Reference: the same model, frozen; it scores pairs once ----
  place = lambda batch: to_global(batch, mesh, rules)
  natural = shardings_of(step.abstract)
  score = make_score(step.execution, natural.model)
  reference = jax.device_put(model, natural.model)
  shape = {
    "seq_len": data.seq_len,
    "global_batch_size": data.global_batch_size,
    "rows": process_rows(step.num_rows, mesh, rules),
  }

  def score_all(pairs):
    batches = pairs_lib.in_order(pairs, **shape)
    return score_pairs(score, reference, batches, place, num_pairs=len(pairs))

  evaluate = None
  if held_out:
    held_out_scores = score_all(held_out)
    evaluate = make_evaluate(
      step.eval_step,
      lambda: pairs_lib.in_order(held_out, held_out_scores, **shape),
      place,
    )
  place_step, pair_scores = place, None
  if config.reference == "precomputed":
    pair_scores = score_all(pairs)
  else:
    place_step = lambda batch: with_scores(score, reference, place(batch))
  batches = pairs_lib.PairBatches(pairs, pair_scores, seed=data.seed, **shape)

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
  if config.reference == "precomputed":
    del reference

  # ---- Train ----
  state, history = fit(
    state,
    step.train_step,
    batches,
    config=config,
    workdir=folder,
    place=place_step,
    evaluate=evaluate,
    natural=step.natural,
    **assembly.utilisation(model_config, batches, step.execution),
    label="dpo",
  )
  return Result(state=state, history=history)


def program(config: DPOConfig, model: ModelConfig, mesh: "Mesh") -> "Program":
  """Returns the run's step on a mesh.

  Args:
    config: of the run, with `num_steps`.
    model: shape of the model.
    mesh: its devices, which may be those of a topology that is not here.
  """
  from align.preference import dpo_loss
  from train.program import make_program

  return make_program(
    config,
    model,
    dpo_loss(beta=config.beta, label_smoothing=config.label_smoothing),
    mesh=mesh,
    rows_per_example=2,
    row_fields=("reference_log_probs",),
  )


if __name__ == "__main__":
  cli.launch(run, DPOConfig)
