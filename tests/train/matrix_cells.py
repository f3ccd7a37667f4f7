"""Trains the tiny model on meshes and on one device; prints distances.

Run by `test_matrix.py`, in a process of its own: a check that fails inside XLA
aborts the interpreter. Prints a JSON object a cell.
"""

import dataclasses
import functools
import json
import sys
import traceback

import jax

from align.preference import dpo_loss
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from tests import quick_xla
from tests.train import breaks, matrix, tiny
from train.config import OptimizerConfig
from train.objective import lm_loss

OPTIMIZERS = {
  # The momentum after the first step is the gradient.
  "sgd": OptimizerConfig(kind="sgd", momentum=0.9, clip_norm=None),
  # With eps 1e-8 the rounding of gradients near 0 alone reaches 2e-5.
  "adamw": OptimizerConfig(eps=1e-4),
}
MODELS = {
  "gqa": tiny.GQA,
  "mha": tiny.MHA,
  "moe": tiny.MOE,
  "moe_capacity": tiny.MOE_CAPACITY,
}
OBJECTIVES = {
  "pretrain": lm_loss(z_loss=1e-3),
  "sft": lm_loss(),
  "dpo": dpo_loss(beta=0.5),
}
# Factors that are settings of the step; the others say what is computed.
STEP = (
  "accumulation",
  "remat",
  "context",
  "zero_stage",
  "embed",
  "schedule",
)
NUM_STEPS = 2


@functools.cache
def start(model: str, dropout: bool):
  """The weights that all cells start from."""
  config = MODELS[model]
  if dropout:
    rates = dict(embed_dropout=0.1, residual_dropout=0.2, attention_dropout=0.3)
    config = dataclasses.replace(config, **rates)
  return tiny.random_model(config)


def train(cell: matrix.Cell, mesh: jax.sharding.Mesh, **settings):
  """(state, metrics) after each step."""
  of = dict(cell.settings)
  make = functools.partial(tiny.packed_batch, packed=of["packed"])
  if cell.loss == "dpo":
    make = tiny.pairs_batch
  return tiny.train(
    start(of["model"], cell.dropout),
    OPTIMIZERS[of["optimizer"]],
    mesh,
    num_steps=NUM_STEPS,
    objective=OBJECTIVES[cell.loss],
    rows_per_example=2 if cell.loss == "dpo" else 1,
    make_batch=functools.partial(make, rows=32),
    **settings,
  )


@functools.cache
def one_device(what: matrix.Cell):
  """The plainest form: no mesh, no micro-batches, nothing recomputed."""
  return train(what, tiny.one_device())


def compare(cell: matrix.Cell) -> dict[str, dict[str, float]]:
  """Distances of a cell from one device."""
  of = dict(cell.settings)
  mesh = make_mesh(MeshConfig(**{"fsdp": 1} | dict(cell.mesh)))
  settings = {name: of[name] for name in STEP if name in of}
  if "embed" in settings:
    settings["rules"] = Rules(embed=tuple(settings.pop("embed").split()))
  if settings.get("schedule") == "interleaved":
    settings["virtual_stages"] = 2
  if cell.kernels:  # The one device runs what XLA makes of plain JAX.
    settings |= dict(attention="tpu", loss="tpu", experts="tpu")
  ours = train(cell, mesh, **settings)
  same = tuple((k, v) for k, v in cell.settings if k not in STEP)
  theirs = one_device(
    dataclasses.replace(cell, mesh=(), settings=same, kernels=False)
  )
  (first, _), (first_of_one, _) = ours[0], theirs[0]
  metrics = {
    f"step{i}.{key}": value
    for i in range(NUM_STEPS)
    for key, value in tiny.distances(ours[i][1], theirs[i][1]).items()
  }
  return dict(
    moments=tiny.distances(first.opt_state, first_of_one.opt_state),
    params=tiny.distances(ours[-1][0].model, theirs[-1][0].model),
    metrics=metrics,
  )


def main(part: str, which: str):
  """Prints cells: a group of `matrix.cover` or `.whole`, or that of a break."""
  quick_xla.use_where_no_tpu_compiles()
  jax.config.update("jax_num_cpu_devices", 8)
  jax.config.update("jax_numpy_rank_promotion", "raise")
  if part == "break":
    cells = [b.comparison() for b in breaks.BREAKS if b.rule == which]
  else:
    cells = [c for c in getattr(matrix, part)() if c.group == which]
  for cell in cells:
    try:
      found = compare(cell)
    except Exception:  # The other cells are worth knowing.
      found = {"error": traceback.format_exc()}
    print(json.dumps({"cell": cell.name} | found), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
