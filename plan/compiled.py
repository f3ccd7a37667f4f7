"""A loop's step, compiled for a TPU topology in a process of its own.

The compiler may abort, and with it the process that called it: one child a
compilation, and its end by a signal is an answer too.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from pallas_kernels import report_chips, schedule
from plan.chips import Topology, parse
from plan.loops import LOOPS
from sharding.hlo_text import Module

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# In either of two ways; the second is about temporaries alone.
_TOO_MUCH = re.compile(
  r"(?:Used |\()([\d.]+)([KMGT]?)(?: of |\) exceeds available HBM \()"
  r"([\d.]+)([KMGT]?)"
)
# How C++ logs what it aborts on: "F1201 12:00:00.5  7 hlo.cc:7] Check failed".
_FATAL = re.compile(r"F\d{4} .*\]")
# What a cloud rents; the compiler takes others too.
_RENTED = {
  "v4": "2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, ...",
  "v5e": "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16",
  "v5p": "2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, ...",
  "v6e": "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16",
}


def compile_step(
  loop: str,
  config: Any,
  topology: str,
  options: Mapping[str, str] | None = None,
) -> dict:
  """Compiles and reads the step of a run.

  Args:
    loop: of `LOOPS`.
    config: of the run.
    topology: of TPUs, see `plan.chips.parse`.
    options: of the compiler, beside those that the loop sets.

  Returns:
    What `measure` returns; or {"rejected": why}, with "fits", "need" and
    "limit", in bytes, where the step needs too much memory.

  Raises:
    ValueError: what the loop refuses, or there is no compiler.
  """
  with tempfile.TemporaryDirectory(prefix="dryrun") as folder:
    files = pathlib.Path(folder)
    values = dataclasses.asdict(config)
    request = {"loop": loop, "config": values, "topology": topology}
    request["options"] = dict(options or {})
    (files / "request").write_text(json.dumps(request))
    # The folder that we are in may have packages of the names of ours.
    path = os.pathsep.join(p for p in sys.path if p)
    flags = schedule.dump_flags(_made(files / "llo"), schedule.PROGRAM_ONLY)
    # Of another compiler; that of TPUs aborts on a flag that it does not know.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {
      "PYTHONPATH": path,
      "JAX_PLATFORMS": "cpu",
      "TPU_SKIP_MDS_QUERY": "1",
      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
      "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}",
    }
    code = (  # A main, which may use `configs`.
      "import sys; from configs import cli; from plan import compiled;"
      " compiled.child(sys.argv[1], cli.from_dict)"
    )
    with open(files / "log", "w") as log:
      done = subprocess.run(
        [sys.executable, "-P", "-c", code, folder],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
      )
    return _answer(files, done.returncode)


def _made(folder: pathlib.Path) -> str:
  folder.mkdir()
  return str(folder)


def _answer(files: pathlib.Path, code: int) -> dict:
  """What a child has left behind."""
  if (files / "answer").is_file():
    answer = json.loads((files / "answer").read_text())
    if "refused" in answer:
      raise ValueError(answer["refused"])
    return answer
  log = (files / "log").read_text(errors="replace")
  lines = [line for line in log.splitlines() if line.strip()]
  said = [line for line in lines if _FATAL.match(line)]
  if code < 0 or said:
    why = (said or lines or ["no word"])[0][:300]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return {"rejected": f"compiler crash ({how}): {why}"}
  last = "\n".join(lines[-20:])
  raise RuntimeError(f"the child that compiles failed:\n{last}")


def child(folder: str, from_dict: Callable[[type, dict], Any]) -> None:
  """Does what `compile_step` asks for; runs in a process of its own.

  Args:
    folder: with the request; the answer goes there.
    from_dict: (class, JSON) -> config.
  """
  files = pathlib.Path(folder)
  request = json.loads((files / "request").read_text())
  loop = request["loop"]
  config = from_dict(LOOPS[loop].config_class, request["config"])
  try:
    answer = measure(
      loop,
      config,
      request["topology"],
      str(files / "llo"),
      request["options"],
    )
  except ValueError as error:
    answer = {"refused": str(error)}
  (files / "answer").write_text(json.dumps(answer))


def measure(
  loop: str,
  config: Any,
  topology: str,
  llo: str,
  options: Mapping[str, str],
) -> dict:
  """Compiles a step and reads what the compiler says of it.

  Args:
    loop: of `LOOPS`.
    config: of the run.
    topology: of TPUs.
    llo: folder that `schedule.dump_flags` named.
    options: of the compiler.

  Returns:
    "compile_seconds", "memory": bytes of a device by part, "times": seconds,
    "collectives": of each group of mesh axes, "kernels", "ops".

  Raises:
    ValueError: what the loop refuses, or there is no such topology.
  """
  import jax

  from sharding.mesh import make_mesh

  machine, found = parse(topology), LOOPS[loop]
  mesh = make_mesh(config.mesh, devices=devices(machine, topology))
  start = time.perf_counter()
  lowered = found.program(config, found.model(config), mesh).lower()
  lower_seconds = time.perf_counter() - start
  try:
    compiled = lowered.compile(compiler_options=dict(options) or None)
  except jax.errors.JaxRuntimeError as error:
    return _rejected(str(error))
  seconds = time.perf_counter() - start - lower_seconds
  # Generation ends when all rows have; one pass is a token of each.
  trips = None if found.trains else 1
  found = {
    "lower_seconds": lower_seconds,
    "compile_seconds": seconds,
    "memory": memory(compiled),
  }
  try:
    text = compiled.as_text()
  except jax.errors.JaxRuntimeError as error:
    # jaxlib 0.10 does not read what libtpu writes for v6e.
    why = str(error).splitlines()[0][:200]
    raise ValueError(
      f"--topology={topology!r}: jax {jax.__version__} cannot read the compiled"
      f" program ({why}); it needs {found['memory']['peak'] / 2**30:.2f} GiB a"
      " device. Wanted a newer jax, for which Python 3.12 is needed"
    ) from error
  module = Module(text, unknown_trips=trips)
  return found | read(module, mesh, machine, llo)


def devices(machine: Topology, topology: str) -> list:
  """Descriptions of a machine's TPUs.

  Raises:
    ValueError: the compiler has no such topology, or there is no compiler.
  """
  from pallas_kernels.aot import topology_devices

  chip = machine.chip.name
  grid = "x".join(map(str, machine.shape))
  # The two cores of a v4 are one device, as in a run.
  name = f"{chip}:{grid}" + ("|megacore" if chip == "v4" else "")
  try:
    there = topology_devices(name, num_slices=machine.num_slices)
  except ValueError as error:
    why = str(error.__cause__ or error).splitlines()[0][:200]
    raise ValueError(
      f"--topology={topology!r}: the compiler has no such machine ({why});"
      f" of {chip} there are {_RENTED[chip]}"
    ) from error
  if len(there) != machine.num_devices:
    raise ValueError(
      f"--topology={topology!r}: wanted {machine.num_devices} devices, the"
      f" compiler has {len(there)}; of {chip} there are {_RENTED[chip]}"
    )
  return there


def _rejected(message: str) -> dict:
  """Why a program was not compiled, in the compiler's words."""
  why = {"rejected": message.strip().splitlines()[0][:300]}
  if found := _TOO_MUCH.search(message):
    need, limit = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
    why |= {"need": need, "limit": limit, "fits": False}
  return why


def memory(compiled: Any) -> dict[str, int]:
  """Bytes of a device by part, of a `jax.stages.Compiled`.

  "outputs" are those that take no argument's place. "peak" is the compiler's
  own figure, of what lives at the same time.
  """
  found = compiled.memory_analysis()
  aliased = found.alias_size_in_bytes
  return {
    "arguments": found.argument_size_in_bytes,
    "temporaries": found.temp_size_in_bytes,
    "outputs": found.output_size_in_bytes - aliased,
    "code": found.generated_code_size_in_bytes,
    "peak": found.peak_memory_in_bytes,
    "host": found.host_argument_size_in_bytes
    + found.host_temp_size_in_bytes
    + found.host_output_size_in_bytes
    - found.host_alias_size_in_bytes,
  }


def need(memory: dict[str, int]) -> int:
  """Bytes of HBM that a device must have, of what `memory` returns."""
  apart = ("peak", "host")
  return sum(size for name, size in memory.items() if name not in apart)


def read(module: Module, mesh: Any, machine: Topology, llo: str) -> dict:
  """What a program does in its time; see `measure`.

  Args:
    module: the compiled program.
    mesh: its devices.
    machine: that they are of.
    llo: folder with the schedules of its kernels.
  """
  from plan import cycles, kernels, links
  from sharding import hlo

  chip = report_chips.CHIPS[machine.chip.name]
  calls = kernels.read(module, llo, chip)
  found = hlo.collectives(module, mesh)
  rates = cycles.Rates(
    clock=chip.bundles_per_second,
    hbm=chip.hbm_bytes_per_second,
    links=links.axis_rates(machine, mesh.shape),
  )
  seconds = {name: kernel.seconds for name, kernel in calls.items()}
  times, line = cycles.times(module, found, rates, seconds)
  sent = {}
  for op in found:
    total = sent.setdefault(op.axes, [0, 0.0])
    total[0] += op.times
    total[1] += op.bytes_sent
  kernel_rows = {}
  for name, kernel in calls.items():
    row = kernel_rows.setdefault(
      (kernel.name, kernel.by), {"calls": 0, "seconds": 0.0}
    )
    row["calls"] += line.kernels[name]
    row["seconds"] += line.kernels[name] * kernel.seconds
  return {
    "times": {
      **times._asdict(),
      "compute": line.compute,
      "waiting for copies": line.copies,
    },
    "host_bytes": line.host_bytes,
    "collectives": {
      " ".join(sorted(axes)) or "nothing": {
        "calls": count,
        "bytes": num_bytes,
        "seconds": line.sent[axes],
        "waited": line.waits[axes],
        "hidden": _hidden(line.waits[axes], line.sent[axes]),
      }
      for axes, (count, num_bytes) in sent.items()
    },
    "kernels": [
      {"name": name, "by": by, **row} for (name, by), row in kernel_rows.items()
    ],
    "ops": [
      {**scope._asdict(), "seconds": seconds}
      for scope, seconds in line.ops.most_common(10)
    ],
  }


def _hidden(waited: float, seconds: float) -> float:
  """The part of a collective's time that passes beside other work."""
  # Waiting for a link that others use counts, so it may be longer.
  return max(0.0, 1 - waited / seconds) if seconds else 0.0
