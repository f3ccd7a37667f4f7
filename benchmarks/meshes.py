"""Which mesh for an 8B model, by the TPU's own compiler, without a TPU.

  python -m benchmarks.meshes --topology v5e:4x4 --mesh fsdp fsdp-tensor

Compiles the production step of a decoder shaped like Llama-3-8B (bf16, AdamW,
blocks rematerialised, Pallas kernels) for each mesh, in a process of its own,
and prints a JSON object a line:

- `hbm_gib`: the peak of a device; `refused` is what the compiler said else;
- `sent_mib`: what a device sends in a step, by the mesh axes it crosses;
- `overlapped`: the share of these bytes with other work scheduled between
  their start and their end;
- `hidden`: the share of their seconds on the links, counted as hidden as long
  as the work between start and end takes by the compiler's estimate. A link
  that several collectives share, or work that several count, is not modelled;
"""

import argparse
import collections
import json
import pathlib
import subprocess
import sys
import time

MESHES = {
  "data": dict(data=-1),
  "fsdp": dict(fsdp=-1),
  "fsdp-tensor": dict(fsdp=-1, tensor=4),
  "fsdp-context": dict(fsdp=-1, context=4),
}
# Bytes a second that a chip sends over its links to others, one way: half of
# the "interchip interconnect bandwidth" of cloud.google.com/tpu/docs.
LINKS = {"v5e": 100e9, "v5p": 300e9, "v6e": 224e9}


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
  mesh = make_mesh(MeshConfig(**sizes), devices=devices)
  # Whoever shares a sequence shares the weights as well.
  rules = Rules(embed=("fsdp", "context"))
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


def measure(arguments: argparse.Namespace, name: str) -> dict:
  """Compiles the step for one mesh."""
  from pallas_kernels.report_chips import CHIPS, chip_of
  from sharding import hlo

  start = time.perf_counter()
  sizes = (arguments.length, arguments.rows, arguments.layers)
  lowered, mesh = build(arguments.topology, name, *sizes)
  found = {
    "topology": arguments.topology,
    "mesh": {axis: n for axis, n in mesh.shape.items() if n > 1},
    "options": arguments.options,
  }
  options = dict(option.split("=") for option in arguments.options)
  try:
    compiled = lowered.compile(compiler_options=options or None)
  except Exception as error:  # out of memory, or an option it does not take
    return found | {"refused": str(error).splitlines()[0][:300]}
  text = compiled.as_text()
  if arguments.dump:
    pathlib.Path(arguments.dump).write_text(text)
  chip = chip_of(arguments.topology)
  clock = CHIPS[chip].bundles_per_second
  totals = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
  for op in hlo.collectives(text, mesh):
    seconds = op.bytes_sent / op.times / LINKS[chip] if op.times else 0.0
    hidden = min(seconds, op.hidden_cycles / clock)
    total = totals[" ".join(sorted(op.axes)) or "none"]
    total[0] += op.bytes_sent
    total[1] += op.bytes_sent * op.asynchronous
    total[2] += hidden * op.times * LINKS[chip]
  share = lambda i: {
    axes: round(total[i] / total[0], 2) if total[0] else 0.0
    for axes, total in totals.items()
  }
  memory = compiled.memory_analysis()
  return found | {
    "compile_seconds": round(time.perf_counter() - start, 1),
    "hbm_gib": round(memory.peak_memory_in_bytes / 2**30, 2),
    "sent_mib": {axes: round(t[0] / 2**20) for axes, t in totals.items()},
    "overlapped": share(1),
    "hidden": share(2),
    "collectives": hlo.summary(hlo.collectives(text, mesh)),
  }


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--topology", default="v5e:4x4")
  parser.add_argument("--mesh", nargs="+", choices=MESHES, default=[*MESHES])
  parser.add_argument("--length", type=int, default=2048)
  parser.add_argument("--rows", type=int, default=1, help="a device")
  parser.add_argument("--layers", type=int, default=32)
  parser.add_argument(
    "--options", nargs="*", default=[], help="NAME=VALUE of the compiler"
  )
  parser.add_argument("--dump", help="a file for the program of one mesh")
  arguments = parser.parse_args()
  if len(arguments.mesh) == 1:
    print(json.dumps(measure(arguments, arguments.mesh[0])), flush=True)
    return
  for name in arguments.mesh:  # The compiler may abort.
    again = [a for a in sys.argv[1:] if a not in (*arguments.mesh, "--mesh")]
    command = [sys.executable, "-m", "benchmarks.meshes", *again]
    done = subprocess.run(
      [*command, "--mesh", name], capture_output=True, text=True
    )
    print(done.stdout.strip() or json.dumps({name: done.stderr[-300:]}))
    sys.stdout.flush()


if __name__ == "__main__":
  main()
