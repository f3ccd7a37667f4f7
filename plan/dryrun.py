"""A loop's step before there is a machine: does it fit, how long does it take.

  python -m plan.dryrun --config=configs/smollm2_135m.py:v5e-8 \
    --topology=v5e:2x4 [--loop=pretrain|sft|dpo|generate] [--json=FILE]

For TPUs the very step that the loop would run is lowered and compiled by their
own compiler (`pip install "onemesh[plan]"`), without a TPU. Its memory is the
compiler's; its time is that of its schedule (`plan/cycles.py`). For GPUs both
are computed from the run's settings (`plan/memory.py`, `plan/step_time.py`).
"generate" is one token for each row of the batch (`plan/generation.py`).
"""

import json
import pathlib
import sys
from importlib.util import find_spec
from typing import Any

from configs import cli
from plan.chips import Topology, parse
from plan.loops import LOOPS


def run(
  config: Any,
  topology: str | None,
  loop: str | None = None,
  json_path: str | None = None,
) -> dict:
  """Prints what the step of a run needs, and writes it as JSON.

  Args:
    config: the run, of the loop's class.
    topology: of the machine, see `plan.chips.parse`.
    loop: of `plan.loops.LOOPS`; None: "pretrain".
    json_path: a file for the same figures.

  Returns:
    The figures; bytes, seconds and FLOPs of one device.

  Raises:
    ValueError: what the loop would refuse, a topology that is not known, or a
      TPU without its compiler.
  """
  from plan import dryrun_table

  if not topology:
    raise ValueError("--topology is missing: 'v5e:4x4', 'h100:8', ...")
  machine, loop = parse(topology), loop or "pretrain"
  on_tpu = machine.chip.platform == "tpu"
  if on_tpu and find_spec("libtpu") is None:
    raise ValueError(
      f"--topology={topology!r} wants the TPU's compiler, libtpu, which is not"
      ' installed: pip install "onemesh[plan]" (Linux on x86-64)'
    )
  if not on_tpu and not LOOPS[loop].trains:
    raise ValueError(
      f"--loop={loop} is compiled, which TPUs alone can be here; got"
      f" --topology={topology!r}. Its memory: python -m plan.memory"
    )
  found = _found(config, topology, loop, machine)
  if on_tpu:
    print("compiling, which may take minutes ...", file=sys.stderr, flush=True)
    _add_compiled(found, config, loop, machine, topology)
  else:
    _add_estimated(found, config, loop, machine)
  if not found.get("fits", True) and LOOPS[loop].trains:
    _add_remedies(found, config, loop, machine)
  print(dryrun_table.table(found))
  if json_path:
    pathlib.Path(json_path).write_text(json.dumps(found, indent=2) + "\n")
  return found


def _found(config: Any, topology: str, loop: str, machine: Topology) -> dict:
  """What is counted, and not compiled."""
  from plan import generation, held, step_time

  run = _as_pretraining(config, loop)
  mesh = held.abstract_mesh(run.mesh, machine.num_devices)
  where = {
    "topology": topology,
    "loop": loop,
    "chip": machine.chip.name,
    "num_devices": machine.num_devices,
    "mesh": {axis: n for axis, n in mesh.shape.items() if n > 1},
    "hbm": machine.chip.hbm_bytes,
    "peak_flops": machine.chip.flops["bfloat16"],
  }
  if not LOOPS[loop].trains:
    tokens, flops = generation.work(run, machine.num_devices)
    return where | {
      "tokens": tokens,
      "model_flops": flops,
      "recomputed_flops": 0.0,
      "hardware_flops": flops,
    }
  here = held.hold(run, machine.num_devices)
  done = step_time.work(run, machine.num_devices)
  checkpoint = getattr(config, "checkpoint", None)
  return where | {
    "tokens": done.tokens,
    "model_flops": done.model_flops,
    "recomputed_flops": done.hardware_flops - done.model_flops,
    "hardware_flops": done.hardware_flops,
    # Four bytes a token, of the whole batch.
    "data_bytes": round(4 * done.tokens * machine.num_devices),
    "checkpoint_bytes": held.whole_bytes(here),
    "checkpoint_every": checkpoint and checkpoint.every,
  }


def _as_pretraining(config: Any, loop: str):
  entry = LOOPS[loop]
  return entry.as_pretraining(config, entry.model(config))


def _beside(config: Any, loop: str, machine: Topology) -> dict[str, int]:
  """Bytes of a device that live beside the step: a live reference."""
  from plan.memory import of_loop

  if getattr(config, "reference", None) != "live":
    return {}
  where = machine.num_devices, machine.chip.platform
  found = of_loop("dpo", _as_pretraining(config, loop), *where)
  return {"reference": found.parts["reference"]}


def _add_compiled(
  found: dict, config: Any, loop: str, machine: Topology, topology: str
) -> None:
  """The compiler's word."""
  from plan import compiled

  answer = compiled.compile_step(loop, config, topology)
  found |= answer
  if "rejected" in answer:
    return
  memory = found["memory"] | _beside(config, loop, machine)
  need = compiled.need(memory)
  found |= {"memory": memory, "need": need, "fits": need <= found["hbm"]}
  _add_rates(found, ("hidden", "estimate", "exposed"))


def _add_estimated(
  found: dict, config: Any, loop: str, machine: Topology
) -> None:
  """Bounds, without a compiler."""
  from plan.memory import training
  from plan.step_time import step_time

  run = _as_pretraining(config, loop)
  memory = training(run, machine.num_devices, machine.chip.platform)
  beside = _beside(config, loop, machine)
  need = memory.peak + sum(beside.values())
  bounds = step_time(run, machine)
  found |= {
    "memory": memory.parts | beside,
    "peak_phase": memory.peak_phase,
    "need": need,
    "fits": need <= found["hbm"],
    "bound": bounds.bound,
    "times": {
      "hidden": bounds.hidden,
      "exposed": bounds.exposed,
      "compute": bounds.compute,
      "waiting for other stages": bounds.waiting,
      "HBM": bounds.memory,
    },
    "collectives": {
      " ".join(axes): {"seconds": seconds}
      for axes, seconds in bounds.links.items()
    },
  }
  _add_rates(found, ("hidden", "exposed"))


def _add_rates(found: dict, names: tuple[str, ...]) -> None:
  """Tokens a second, MFU and HFU, at each time of a step."""
  peak = found["peak_flops"]
  found["rates"] = {
    name: {
      "seconds": (seconds := found["times"][name]),
      "tokens_per_second": found["tokens"] / seconds,
      "mfu": found["model_flops"] / peak / seconds,
      "hfu": found["hardware_flops"] / peak / seconds,
    }
    for name in names
  }


def _add_remedies(
  found: dict, config: Any, loop: str, machine: Topology
) -> None:
  """What to change, by estimates held to what the compiler needs."""
  from plan import remedies
  from plan.memory import training

  run = _as_pretraining(config, loop)
  beside = sum(_beside(config, loop, machine).values())
  now = training(run, machine.num_devices, machine.chip.platform).peak + beside
  found["remedies"] = [
    remedy._asdict()
    for remedy in remedies.find(run, machine, max(1.0, found["need"] / now))
  ]


if __name__ == "__main__":
  cli.launch(
    lambda config, topology, loop, json: run(config, topology, loop, json),
    {name: loop.config_class for name, loop in LOOPS.items()},
    options={
      "topology": "the machine: v5e:4x4, v5p:2x(4x4x4), h100:16x8, ...",
      "loop": f"{', '.join(LOOPS)}; pretrain if not given",
      "json": "a file for the same figures",
    },
  )
