"""Which mesh for an 8B model, by the TPU's own compiler, without a TPU.

  python -m benchmarks.meshes --topology v5e:4x4 --mesh fsdp fsdp-tensor
  python -m benchmarks.meshes --topology v5p:2x2x2 --mesh fsdp --options none

Compiles the production step of a decoder shaped like Llama-3-8B (bf16, AdamW,
full rematerialisation, the Pallas kernels) for each mesh, each in a process of
its own, and prints one JSON object a line:

- `hbm_gib`: peak of a device, or what the compiler asked for in vain;
- `sent_mib`: bytes that a device sends in a step, by mesh axes;
- `hidden`: share of the seconds of communication in which other work is
  scheduled, by mesh axes: the compiler's estimate of the work between start
  and done of each collective, at most the time on the links, over this time;
- `compute_cycles`: the compiler's estimate of all its instructions.

`--options none` leaves out `sharding.overlap.OPTIONS` of the chip.
"""

import argparse
import json
import pathlib
import time

# Devices along the axes, for 16 and for 8 chips; rows a chip and accumulation.
MESHES = {
  "data": dict(data=-1),
  "fsdp": dict(fsdp=-1),
  "fsdp-zero2": dict(fsdp=-1),
  "fsdp-tensor": dict(fsdp=-1, tensor=4),
  "fsdp-context": dict(fsdp=-1, context=4),
  "fsdp-pipeline": dict(fsdp=-1, pipeline=2),
}


def build(topology: str, name: str, length: int, rows: int, layers: int):
  """Lowers the step; returns it and its mesh."""
  import jax
  import numpy as np

  from model.config import ModelConfig, Rope
  from model.execution import Execution
  from model.precision import POLICIES
  from model.transformer import Transformer
  from pallas_kernels.aot import topology_devices
  from sharding.arrays import batch_sharding
  from sharding.axes import MeshConfig, Rules
  from sharding.mesh import make_mesh
  from train.config import OptimizerConfig, ScheduleConfig
  from train.objective import lm_loss
  from train.optimizers import make_optimizer
  from train.schedules import make_schedule
  from train.state import abstract_state, shardings_of
  from train.step import make_train_step

  config = ModelConfig(
    vocab_size=128256,
    num_layers=layers,
    embed_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=14336,
    max_positions=8192,
    rope=Rope(theta=5e5),
  )
  devices = topology_devices(topology)
  sizes = {"fsdp": 1} | MESHES[name]
  mesh, rules = make_mesh(MeshConfig(**sizes), devices=devices), Rules()
  optimizer = make_optimizer(
    OptimizerConfig(), make_schedule(ScheduleConfig(), 1000)
  )
  state = abstract_state(
    lambda rngs: Transformer(config, rngs=rngs),
    optimizer,
    mesh=mesh,
    rules=rules,
  )
  step = make_train_step(
    lm_loss(),
    optimizer,
    Execution(mesh=mesh, precision=POLICIES["bf16"], remat="block"),
    shardings_of(state),
  )
  batch = {
    field: jax.ShapeDtypeStruct(
      (rows * len(devices), length),
      np.float32 if field == "loss_weights" else np.int32,
      sharding=batch_sharding(mesh, rules),
    )
    for field in (
      "tokens",
      "targets",
      "positions",
      "segment_ids",
      "loss_weights",
    )
  }
  return step.on_leaves.lower(jax.tree.leaves(state), batch), mesh


def measure(arguments: argparse.Namespace) -> dict:
  """Compiles one mesh."""
  from sharding import hlo

  start = time.perf_counter()
  lowered, mesh = build(
    arguments.topology,
    arguments.mesh[0],
    arguments.length,
    arguments.rows,
    arguments.layers,
  )
  options = dict(option.split("=") for option in arguments.options)
  compiled = lowered.compile(compiler_options=options or None)
  if arguments.dump:
    pathlib.Path(arguments.dump).write_text(compiled.as_text())
  found = hlo.collectives(compiled.as_text(), mesh)
  table = {}
  for op in found:
    axes = " ".join(sorted(op.axes)) or "none"
    sent, asynchronous = table.get(axes, (0.0, 0.0))
    table[axes] = (
      sent + op.bytes_sent,
      asynchronous + op.bytes_sent * op.asynchronous,
    )
  return {
    "topology": arguments.topology,
    "mesh": {axis: n for axis, n in mesh.shape.items() if n > 1},
    "seconds": round(time.perf_counter() - start, 1),
    "hbm_gib": round(
      compiled.memory_analysis().peak_memory_in_bytes / 2**30, 2
    ),
    "sent_mib": {
      axes: round(sent / 2**20) for axes, (sent, _) in table.items()
    },
    "async": {
      axes: round(part / sent, 3) if sent else 0.0
      for axes, (sent, part) in table.items()
    },
    "collectives": hlo.summary(found),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--topology", default="v5e:4x4")
  parser.add_argument("--mesh", nargs="+", default=list(MESHES))
  parser.add_argument("--length", type=int, default=2048)
  parser.add_argument("--rows", type=int, default=1, help="a device")
  parser.add_argument("--layers", type=int, default=32)
  parser.add_argument("--options", nargs="*", default=[])
  parser.add_argument("--dump", default=None)
  parser.add_argument("--child", action="store_true")
  arguments = parser.parse_args()
  print(json.dumps(measure(arguments)), flush=True)


if __name__ == "__main__":
  main()
