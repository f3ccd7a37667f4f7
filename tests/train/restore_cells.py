"""Saves on each layout, restores onto each, and takes a step; prints distances.

Run by `test_restore.py`, in a process of its own: a check that fails inside XLA
aborts the interpreter. Prints a JSON object a pair of layouts.
"""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np

from model.transformer import Transformer
from sharding.arrays import to_global
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from tests import quick_xla
from tests.train import tiny
from train import checkpoint
from train.config import OptimizerConfig
from train.layout import to_arranged, to_natural
from train.state import TrainState, abstract_state, shardings_of

# name -> arguments of `tiny.start`; a new kind of layout joins by one line.
LAYOUTS = {
  "data": dict(mesh=MeshConfig(data=8, fsdp=1)),
  "fsdp": dict(mesh=MeshConfig(fsdp=8)),
  "tensor": dict(mesh=MeshConfig(fsdp=1, tensor=8)),
  "mixed": dict(mesh=MeshConfig(data=2, fsdp=2, tensor=2)),
  "zero 1": dict(mesh=MeshConfig(data=2, fsdp=4), zero_stage=1),
  "zero 2": dict(mesh=MeshConfig(fsdp=8), zero_stage=2),
  "pipeline": dict(mesh=MeshConfig(pipeline=4, fsdp=2), accumulation=4),
  "interleaved": dict(
    mesh=MeshConfig(fsdp=1, pipeline=2, tensor=4),
    accumulation=2,
    schedule="interleaved",
    virtual_stages=2,
  ),
}
# Those that differ most from each other.
FEW = ("mixed", "zero 1", "interleaved")
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
    # Five layers, which no two stages share evenly.
    config = dataclasses.replace(tiny.MHA, num_layers=5)
    model = tiny.random_model(config)
    state, self.step = tiny.start(model, OPTIMIZER, self.mesh, **settings)
    self.placed = jax.tree.map(lambda x: x.sharding, state)
    self.abstract = abstract_state(
      lambda rngs: Transformer(config, rngs=rngs),
      tiny.optimizer_of(OPTIMIZER),
      mesh=self.mesh,
      rules=Rules(),
      zero_stage=settings.get("zero_stage", 3),
    )
    self.layout = tiny.layout_of(
      model, self.mesh, settings.get("virtual_stages", 1)
    )
    state, _ = self.step(state, self.batch(0))
    saved = self.natural(state)
    self.saved = jax.device_get(saved)
    saver = checkpoint.Saver(folder, keep=1, config={}, start_step=0)
    saver.save(1, saved, {})
    saver.close()
    state, metrics = self.step(state, self.batch(1))
    self.after = jax.device_get((self.natural(state), metrics))

  def natural(self, state: TrainState) -> TrainState:
    """The state with its layers in the order of the model."""
    return to_natural(state, self.layout, shardings_of(self.abstract))

  def batch(self, number: int):
    batch = tiny.packed_batch(number, rows=16)
    return to_global(batch, self.mesh, Rules())


def compare(source: Layout, target: Layout) -> dict:
  """Restores what `source` saved onto `target`, and goes on."""
  state = checkpoint.restore_latest(source.folder, target.abstract).state
  pairs = zip(jax.tree.leaves(state), jax.tree.leaves(source.saved))
  bitwise = all(np.array_equal(ours, theirs) for ours, theirs in pairs)
  state = to_arranged(state, target.layout, target.placed)
  placed = [x.sharding for x in jax.tree.leaves(state)]
  wanted = jax.tree.leaves(target.placed)
  state, metrics = target.step(state, target.batch(1))
  ours, metrics = jax.device_get((target.natural(state), metrics))
  theirs, metrics_of_source = source.after
  return {
    "bitwise": bitwise,
    "placed": placed == wanted,
    "state": tiny.distances(ours, theirs),
    "metrics": tiny.distances(metrics, metrics_of_source),
  }


def main(folder: str, *names: str):
  """Prints all pairs of the named layouts."""
  quick_xla.use_where_no_tpu_compiles()
  jax.config.update("jax_num_cpu_devices", 8)
  jax.config.update("jax_numpy_rank_promotion", "raise")
  layouts = {
    name: Layout(pathlib.Path(folder) / name, **LAYOUTS[name]) for name in names
  }
  for source in layouts:
    for target in layouts:
      found = compare(layouts[source], layouts[target])
      print(json.dumps({"cell": f"{source} {target}"} | found), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
