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
  "pipeline-tensor": dict(pipeline=-1, tensor=4),
}


def build(topology: str, name: str, length: int, rows: int, layers: int):
  """Lowers the step of `train.pretrain`; returns it and its mesh."""
  from data.config import DataConfig
  from model.config import ModelConfig, Rope
  from pallas_kernels.aot import topology_devices
  from sharding.axes import MeshConfig, Rules
  from sharding.mesh import make_mesh
  from train import pretrain
  from train.config import StepConfig
  from train.run_config import PretrainConfig

  model = ModelConfig(
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
  mesh_config = MeshConfig(**{"fsdp": 1} | MESHES[name])
  mesh = make_mesh(mesh_config, devices=devices)
  # A pipeline takes the rows of a device one after the other.
  stages = mesh.shape["pipeline"]
  config = PretrainConfig(
    model=model,
    data=DataConfig(
      sources=(),
      tokenizer="",
      seq_len=length,
      global_batch_size=rows * len(devices),
    ),
    num_steps=1000,
    mesh=mesh_config,
    # Whoever shares a sequence shares the weights as well.
    rules=Rules(embed=("fsdp", "context")),
    step=StepConfig(
      remat="block", accumulation=rows * stages if stages > 1 else 1
    ),
  )
  return pretrain.program(config, mesh).lower(), mesh


def measure(arguments: argparse.Namespace, name: str) -> dict:
  """Compiles the step for one mesh."""
  from pallas_kernels import report_chips
  from plan.chips import CHIPS
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
  chip = report_chips.chip_of(arguments.topology)
  clock = report_chips.CHIPS[chip].bundles_per_second
  # Over all links of a chip, whichever a collective takes.
  rate = CHIPS[chip].fast_bytes_per_second
  totals = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
  for op in hlo.collectives(text, mesh):
    seconds = op.bytes_sent / op.times / rate if op.times else 0.0
    hidden = min(seconds, op.hidden_cycles / clock)
    total = totals[" ".join(sorted(op.axes)) or "none"]
    total[0] += op.bytes_sent
    total[1] += op.bytes_sent * op.asynchronous
    total[2] += hidden * op.times * rate
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
