"""Which mesh, ZeRO stage, micro-batch, schedule and rematerialisation?

  python -m plan.mesh_search --model=llama3_8b --topology=v5e:4x4 \
    --global_batch_tokens=131072 [--seq_len=2048] [--show=10] [--verify=3] \
    [--json=FILE]
  python -m plan.mesh_search --config=configs/smollm2_135m.py:v5e-8 \
    --topology=v5e:2x4

Every mesh of the machine gets the settings that suit it best, and the reason
why it lost, by the analytical model (`plan.memory`, `plan.step_time`). The
best few are then compiled for the TPU, as `plan.dryrun` does (`--verify=0`:
none), and the fastest of them that fits is printed as code to paste.
"""

import dataclasses
import json
import pathlib
import sys
from importlib.util import find_spec
from typing import Any

from absl import app, flags

from configs import cli
from plan.chips import Topology, parse
from train.run_config import PretrainConfig


def run_config(
  model: str | None,
  config: str | None,
  seq_len: int | None = None,
  global_batch_tokens: int | None = None,
) -> PretrainConfig:
  """The run whose place is searched.

  Args:
    model: a published model's name, such as "llama3_8b".
    config: in place of it, FILE.py or FILE.py:variant.
    seq_len: T; None: the config's, or the model's longest, at most 4096.
    global_batch_tokens: of a step; None: the config's.

  Raises:
    ValueError: neither or both are given, one is not known, or the tokens are
      no whole rows.
  """
  if (model is None) == (config is None):
    raise ValueError("wanted one of --model=llama3_8b and --config=FILE.py")
  if config is not None:
    found = cli.configure(config, PretrainConfig, {})
  else:
    found = _of_model(model, seq_len)
    if global_batch_tokens is None:
      raise ValueError("--global_batch_tokens is missing: the tokens of a step")
  seq_len = seq_len or found.data.seq_len
  rows, rest = found.data.global_batch_size, 0
  if global_batch_tokens is not None:
    rows, rest = divmod(global_batch_tokens, seq_len)
  if rest or rows < 1:
    raise ValueError(
      f"--global_batch_tokens={global_batch_tokens} must be a positive multiple"
      f" of the {seq_len} tokens of a row (--seq_len)"
    )
  data = dataclasses.replace(
    found.data, seq_len=seq_len, global_batch_size=rows
  )
  return dataclasses.replace(found, data=data)


def _of_model(model: str, seq_len: int | None) -> PretrainConfig:
  """A run of a published model on no data."""
  from data.config import DataConfig
  from model.families.registry import preset

  shape = preset(model)
  seq_len = seq_len or min(shape.max_positions, 4096)
  data = DataConfig(
    sources=(), tokenizer="", seq_len=seq_len, global_batch_size=1
  )
  return PretrainConfig(model=shape, data=data, num_steps=1)


def code(config: PretrainConfig) -> str:
  """The mesh, rules and step of a run as Python, without what is default."""

  def call(value: Any) -> str:
    default = type(value)()
    changed = [
      f"{field.name}={here!r}"
      for field in dataclasses.fields(value)
      if (here := getattr(value, field.name)) != getattr(default, field.name)
    ]
    return f"{type(value).__name__}({', '.join(changed)})"

  parts = {"mesh": config.mesh, "rules": config.rules, "step": config.step}
  return "\n".join(f"{name}={call(part)}," for name, part in parts.items())


def run(
  config: PretrainConfig,
  topology: str,
  *,
  show: int = 10,
  verify: int = 0,
  json_path: str | None = None,
) -> list:
  """Searches, prints, and returns the candidates, the best first.

  Args:
    config: the run; its mesh and what is searched of its step are not read.
    topology: of the machine.
    show: meshes to print.
    verify: of the best, how many to compile.
    json_path: a file for all of them.

  Raises:
    ValueError: the run fits on no mesh; says the smallest slice that would do.
      Or there is no compiler.
  """
  from plan import candidates

  machine = parse(topology)
  found = candidates.best_of_each(
    config, machine, keep=max(verify, 1), progress=True
  )
  best = found[0]
  if not best.fits:
    raise ValueError(_no_room(config, found, machine))
  tokens = config.data.global_batch_size * config.data.seq_len
  print(
    f"{tokens:,} tokens a step on {machine.num_devices} x {machine.chip.name},"
    f" {len(found)} meshes; seconds a step, GiB a device:\n"
  )
  for way in found[:show]:
    least = " " if way.fits or way.time is None else ">"
    seconds = f"{way.time.likely:8.3f}" if way.time else f"{'-':>8}"
    gib = way.memory.peak / candidates.GIB if way.memory else None
    print(
      f"{least}{seconds}{'-' if gib is None else f'{gib:.1f}':>7}  {way.name}\n"
      f"{'':18}{way.why(best, machine)}"
    )
  if len(found) > show:
    print(f"\n{len(found) - show} more: --show={len(found)}, or --json=FILE")
  mfu = best.time.mfu(best.time.likely)
  print(
    f"\nbest: MFU {mfu:.0%} by these bounds, which know of no inefficiency but"
    " waiting"
  )
  rows = [_as_json(way, best, machine) for way in found]
  for way, row in zip(found[:verify], rows, strict=False):
    if way.fits:
      row["compiled"] = _verified(way, topology, machine)
  fitting = [row for row in rows if row.get("compiled", {}).get("fits")]
  if fitting:
    chosen = min(fitting, key=lambda row: row["compiled"]["seconds"])
    found.insert(0, found.pop(rows.index(chosen)))
  if json_path:
    pathlib.Path(json_path).write_text(json.dumps(rows, indent=2) + "\n")
  if any("compiled" in row for row in rows) and not fitting:
    print("\nnone of them fits: try more, with --verify")
  else:
    print(f"\n{code(found[0].config)}")
  return found


def _verified(way, topology: str, machine: Topology) -> dict:
  """What the TPU's compiler says of a candidate; prints it."""
  from plan import candidates, compiled

  answer = compiled.compile_step("pretrain", way.config, topology)
  if "rejected" in answer:
    print(f"\ncompiled: {way.name}\n{'':18}rejected: {answer['rejected']}")
    return {"fits": False, "rejected": answer["rejected"]}
  need, seconds = compiled.need(answer["memory"]), answer["times"]["estimate"]
  fits = need <= machine.chip.hbm_bytes
  print(
    f"\ncompiled: {way.name}\n{seconds:9.3f}{need / candidates.GIB:7.1f}  MFU"
    f" {way.time.mfu(seconds):.0%}{'' if fits else '; does not fit'}",
    flush=True,
  )
  return {"fits": fits, "need": need, "seconds": seconds}


def _as_json(way, best, machine: Topology) -> dict:
  mesh, step = way.config.mesh, way.config.step
  return {
    "mesh": dataclasses.asdict(mesh),
    "zero_stage": step.zero_stage,
    "accumulation": step.accumulation,
    "schedule": step.schedule,
    "virtual_stages": step.virtual_stages,
    "remat": step.remat,
    "fits": way.fits,
    "peak": way.memory.peak if way.memory else None,
    "seconds": way.time.parts if way.time else None,
    "likely": way.time.likely if way.time else None,
    "why": way.why(best, machine),
  }


def _no_room(config: PretrainConfig, found: list, machine: Topology) -> str:
  """Says what comes nearest, and the smallest slice on which it would fit."""
  from plan import candidates

  nearest = min(
    (way for way in found if way.memory is not None),
    key=lambda way: way.memory.peak,
  )
  text = (
    f"this run fits on no mesh of {machine.num_devices} x {machine.chip.name};"
    f" nearest is {nearest.name}: {nearest.why(nearest, machine)}"
  )
  larger = machine
  for _ in range(8):
    larger = _doubled(larger)
    if larger is None:
      break
    rows = max(config.data.global_batch_size, larger.num_devices)
    data = dataclasses.replace(config.data, global_batch_size=rows)
    run = dataclasses.replace(config, data=data)
    if candidates.fits_somehow(run, larger):
      grid = "x".join(map(str, larger.shape))
      if larger.num_slices > 1:
        grid = f"{larger.num_slices}x({grid})"
      return (
        f"{text}. Smallest that would do: --topology={larger.chip.name}:{grid}"
        f" with at least {rows} rows a step"
      )
  return text


def _doubled(machine: Topology) -> Topology | None:
  """A slice of twice as many chips; None: there is none."""
  shape = sorted(machine.shape)
  shape[0] *= 2
  larger = dataclasses.replace(machine, shape=tuple(sorted(shape)))
  if larger.slice_size <= machine.chip.node:
    return larger
  if machine.chip.torus_dims:
    return None
  return dataclasses.replace(machine, num_slices=2 * machine.num_slices)


def main(argv) -> None:
  """Searches as the flags say."""
  asked = flags.FLAGS
  if len(argv) > 1:
    sys.exit(f"error: wanted flags alone, got {argv[1:]}")
  try:
    if not asked.topology:
      raise ValueError("--topology is missing: 'v5e:4x4', 'h100:8', ...")
    on_tpu = parse(asked.topology).chip.platform == "tpu"
    verify = asked.verify
    if verify is None:
      verify = 3 if on_tpu and find_spec("libtpu") else 0
    elif verify and not on_tpu:
      raise ValueError(f"--verify={verify}: GPUs have no compiler here")
    config = run_config(
      asked.model, asked.config, asked.seq_len, asked.global_batch_tokens
    )
    run(
      config,
      asked.topology,
      show=asked.show,
      verify=verify,
      json_path=asked.json,
    )
  except ValueError as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  flags.DEFINE_string("model", None, "a published model: llama3_8b, ...")
  flags.DEFINE_string("config", None, "in place of it, FILE.py[:variant]")
  flags.DEFINE_string("topology", None, "the machine: v5e:4x4, h100:16x8, ...")
  flags.DEFINE_integer("global_batch_tokens", None, "tokens a step")
  flags.DEFINE_integer("seq_len", None, "tokens a row; at most 4096 else")
  flags.DEFINE_integer("show", 10, "meshes to print")
  flags.DEFINE_integer(
    "verify", None, "meshes to compile; 3 where there is a compiler"
  )
  flags.DEFINE_string("json", None, "a file for all of them")
  app.run(main)
