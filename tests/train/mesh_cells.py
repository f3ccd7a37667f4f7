"""Trains the tiny model on several meshes and on one device; prints distances.

Run by `test_equivalence.py`, in a process of its own: a check that fails
inside XLA aborts the interpreter. Prints one JSON object a cell.
"""

import json
import os
import sys

# LLVM's optimiser would take half of the time and changes no collective.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

import dataclasses

import jax

from sharding.axes import MeshConfig
from sharding.mesh import make_mesh
from tests.train import tiny
from train.config import OptimizerConfig

OPTIMIZERS = {
  # The momentum after the first step is the gradient.
  "sgd": OptimizerConfig(kind="sgd", momentum=0.9, clip_norm=None),
  # With eps 1e-8 the rounding of gradients near 0 alone reaches 2e-5.
  "adamw": OptimizerConfig(eps=1e-4),
}

DROPOUT = dataclasses.replace(
  tiny.GQA, embed_dropout=0.1, residual_dropout=0.2, attention_dropout=0.3
)

# group -> (model, cells of data, fsdp, tensor, rematerialisation)
GROUPS = {
  "gqa": (
    tiny.GQA,
    [(8, 1, 1, "block"), (1, 8, 1, "nested"), (2, 2, 2, "block")],
  ),
  "mha": (tiny.MHA, [(1, 1, 8, "dots")]),
  "dropout": (DROPOUT, [(2, 2, 2, "block")]),
  # One cell an axis: the Pallas kernels, interpreted.
  "kernels": (
    DROPOUT,
    [(2, 1, 1, "block"), (1, 2, 1, "none"), (1, 1, 2, "nested")],
  ),
}
# The one device runs what XLA makes of plain JAX.
KERNELS = dict(attention="tpu", loss="tpu")


def main(group: str):
  """Prints the cells of a group."""
  jax.config.update("jax_num_cpu_devices", 8)
  jax.config.update("jax_numpy_rank_promotion", "raise")
  config, cells = GROUPS[group]
  model = tiny.random_model(config)
  names = ["sgd", "adamw"] if group in ("gqa", "mha") else ["adamw"]
  kernels = KERNELS if group == "kernels" else {}
  for name in names:
    # The plainest form: no mesh, no micro-batches, nothing recomputed.
    theirs = tiny.train(model, OPTIMIZERS[name], tiny.one_device())
    for data, fsdp, tensor, remat in cells:
      mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor))
      ours = tiny.train(
        model, OPTIMIZERS[name], mesh, accumulation=2, remat=remat, **kernels
      )
      moments = distances_of(ours, theirs, 0, lambda state: state.opt_state)
      params = distances_of(ours, theirs, -1, lambda state: state.model)
      metrics = {
        f"step{i}.{key}": value
        for i in range(3)
        for key, value in tiny.distances(ours[i][1], theirs[i][1]).items()
      }
      cell = f"{data}x{fsdp}x{tensor} {name}"
      report = dict(moments=moments, params=params, metrics=metrics)
      print(json.dumps({"cell": cell} | report), flush=True)


def distances_of(ours, theirs, step, part):
  """Distances of a part of the states after a step."""
  return tiny.distances(part(ours[step][0]), part(theirs[step][0]))


if __name__ == "__main__":
  main(sys.argv[1])
