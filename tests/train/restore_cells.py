"""Saves on each layout, restores onto each, and takes a step; prints distances.

Run by `test_restore.py`, in a process of its own: a check that fails inside XLA
aborts the interpreter. Prints a JSON object a pair of layouts.
"""

import json
import os
import pathlib
import sys

import jax
import numpy as np

from sharding.arrays import to_global
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from tests.train import tiny
from train import checkpoint
from train.config import OptimizerConfig

# name -> arguments of `tiny.start`; a new kind of layout joins by one line.
LAYOUTS = {
  "data": dict(mesh=MeshConfig(data=8, fsdp=1)),
  "fsdp": dict(mesh=MeshConfig(fsdp=8)),
  "tensor": dict(mesh=MeshConfig(fsdp=1, tensor=8)),
  "mixed": dict(mesh=MeshConfig(data=2, fsdp=2, tensor=2)),
}
# With eps 1e-8 the rounding of gradients near 0 alone reaches 2e-5.
OPTIMIZER = OptimizerConfig(eps=1e-4)


class Layout:
  """One way to lay out a state, and its step.

  Attributes:
    saved: the state that is in the checkpoint, on the host.
    after: (state, metrics) after one step more, on the host.
  """

  def __init__(self, folder: pathlib.Path, *, mesh: MeshConfig, **settings):
    self.folder = folder
    self.mesh = make_mesh(mesh)
    model = tiny.random_model(tiny.MHA)
    state, self.step = tiny.start(model, OPTIMIZER, self.mesh, **settings)
    self.abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      state,
    )
    state, _ = self.step(state, self.batch(0))
    self.saved = jax.device_get(state)
    saver = checkpoint.Saver(folder, keep=1, config={}, start_step=0)
    saver.save(1, state, {})
    saver.close()
    self.after = jax.device_get(self.step(state, self.batch(1)))

  def batch(self, number: int):
    return to_global(tiny.packed_batch(number), self.mesh, Rules())


def compare(source: Layout, target: Layout) -> dict:
  """Restores what `source` saved onto `target`, and goes on."""
  state = checkpoint.restore_latest(source.folder, target.abstract).state
  pairs = zip(jax.tree.leaves(state), jax.tree.leaves(source.saved))
  bitwise = all(np.array_equal(ours, theirs) for ours, theirs in pairs)
  placed = [x.sharding for x in jax.tree.leaves(state)]
  wanted = [x.sharding for x in jax.tree.leaves(target.abstract)]
  ours, metrics = jax.device_get(target.step(state, target.batch(1)))
  theirs, metrics_of_source = source.after
  return {
    "bitwise": bitwise,
    "placed": placed == wanted,
    "state": tiny.distances(ours, theirs),
    "metrics": tiny.distances(metrics, metrics_of_source),
  }


def main(folder: str):
  """Prints all pairs."""
  # LLVM's optimiser would take half of the time and changes no collective.
  os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
  jax.config.update("jax_num_cpu_devices", 8)
  jax.config.update("jax_numpy_rank_promotion", "raise")
  layouts = {
    name: Layout(pathlib.Path(folder) / name, **settings)
    for name, settings in LAYOUTS.items()
  }
  for source in layouts:
    for target in layouts:
      found = compare(layouts[source], layouts[target])
      print(json.dumps({"cell": f"{source} {target}"} | found), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
