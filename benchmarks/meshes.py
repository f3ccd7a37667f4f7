"""Which mesh for an 8B model, by the TPU's own compiler, without a TPU.

  python -m benchmarks.meshes --topology v5e:4x4 --mesh fsdp fsdp-tensor
  python -m benchmarks.meshes --topology v5e:4x4 --mesh fsdp-tensor \
    --options xla_enable_async_all_gather=true A=1,B=2

Compiles the production step of a decoder shaped like Llama-3-8B (bf16, AdamW,
Pallas kernels) for each mesh, alone and with each set of the compiler's
options, and prints a JSON object a line:

- `need_gib`: all that a device must hold; `rejected` is what was said else;
- `sent_mib`: what a device sends in a step, by the mesh axes it crosses;
- `hidden`: the share of its time on the links that passes beside other work,
  as `plan/cycles.py` reads the schedule;
- `seconds`: of a step, with all communication hidden, as it is scheduled, and
  with none hidden; `faster`: as scheduled, without the options over with them.
"""

import argparse
import json
import time

from data.config import DataConfig
from model.families.llama import llama3_8b
from plan import compiled
from plan.chips import parse
from sharding.axes import MeshConfig, Rules
from sharding.mesh import axis_sizes
from train.config import StepConfig
from train.run_config import PretrainConfig

MESHES = {
  "data": dict(data=-1),
  "fsdp": dict(fsdp=-1),
  "data-fsdp": dict(data=4, fsdp=-1),
  "fsdp-tensor": dict(fsdp=-1, tensor=4),
  "fsdp-context": dict(fsdp=-1, context=4),
  "pipeline-tensor": dict(pipeline=-1, tensor=4),
}


def run(arguments: argparse.Namespace, name: str) -> PretrainConfig:
  """The run on one of the meshes, of `arguments.rows` a device."""
  devices = parse(arguments.topology).num_devices
  mesh = MeshConfig(**{"fsdp": 1} | MESHES[name])
  # A pipeline takes the rows of a device one after the other.
  stages = axis_sizes(mesh, devices)["pipeline"]
  micro = arguments.rows * stages if stages > 1 else 1
  return PretrainConfig(
    model=llama3_8b(),
    data=DataConfig(
      sources=(),
      tokenizer="",
      seq_len=arguments.length,
      global_batch_size=arguments.rows * devices,
    ),
    num_steps=1000,
    mesh=mesh,
    # Whoever shares a sequence shares the weights as well.
    rules=Rules(embed=("fsdp", "context")),
    step=StepConfig(remat=arguments.remat, accumulation=micro),
  )


def measure(config: PretrainConfig, topology: str, options: str) -> dict:
  """Compiles a step; `options` are NAME=VALUE, with commas between."""
  start = time.perf_counter()
  asked = dict(one.split("=", 1) for one in options.split(",") if one)
  found = compiled.compile_step("pretrain", config, topology, asked)
  if "rejected" in found:
    return {"rejected": found["rejected"]}
  links = found["collectives"]
  times = ("hidden", "estimate", "exposed")
  return {
    "wall_seconds": round(time.perf_counter() - start, 1),
    "compile_seconds": round(found["compile_seconds"], 1),
    "need_gib": round(compiled.need(found["memory"]) / 2**30, 2),
    "sent_mib": {
      axes: round(op["bytes"] / 2**20) for axes, op in links.items()
    },
    "hidden": {axes: round(op["hidden"], 2) for axes, op in links.items()},
    "seconds": {name: round(found["times"][name], 4) for name in times},
  }


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--topology", default="v5e:4x4")
  parser.add_argument("--mesh", nargs="+", choices=MESHES, default=[*MESHES])
  parser.add_argument("--length", type=int, default=2048)
  parser.add_argument("--rows", type=int, default=1, help="a device")
  parser.add_argument("--remat", default="block")
  parser.add_argument("--options", nargs="*", default=[], help="sets of them")
  arguments = parser.parse_args()
  for name in arguments.mesh:
    plain = None
    for options in ("", *arguments.options):
      row = {"topology": arguments.topology, "mesh": name, "options": options}
      try:
        row |= measure(run(arguments, name), arguments.topology, options)
      except (RuntimeError, ValueError) as error:
        row["refused"] = str(error)[-300:]
      if "seconds" in row:
        plain = plain or row["seconds"]["estimate"]
        row["faster"] = round(plain / row["seconds"]["estimate"], 4)
      print(json.dumps(row), flush=True)


if __name__ == "__main__":
  main()
