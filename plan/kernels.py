"""Seconds of the Pallas kernels in a compiled program, by their schedules.

The compiler gives no estimate for a kernel. Its bundles are counted
(`pallas_kernels/schedule_run.py`), its bytes too, and the slower of both is its
time. What depends on data is taken as the FLOPs of a model are: each row is one
segment. Where more than that is unknown, the FLOPs that the kernel's author
states, at the chip's peak, are a lower bound.
"""

import dataclasses
import importlib
import re
from typing import Literal

from pallas_kernels import schedule, schedule_run
from pallas_kernels.report_chips import Chip
from pallas_kernels.report_read import words_in_memory
from sharding.hlo_text import Instruction, Module

KERNEL = "tpu_custom_call"
# Kernel -> the module whose `one_segment` knows its scalars.
_SCALARS = {
  f"flash_attention_{way}": "pallas_kernels.flash_attention.report"
  for way in ("fwd", "bwd")
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """One call of a kernel on one device.

  Attributes:
    name: as its author named it.
    seconds: the estimate.
    by: what it is from. "schedule": bundles at the chip's clock; "HBM": bytes
      at the chip's bandwidth; "FLOPs": stated ones at the chip's peak, since
      the schedule depends on data; "nothing": no FLOPs are stated either.
    bundles: of one call on the slower core; None: not known.
    hbm_bytes: that a call copies.
    flops: that its author states.
  """

  name: str
  seconds: float
  by: Literal["schedule", "HBM", "FLOPs", "nothing"]
  bundles: int | None
  hbm_bytes: int
  flops: int


def read(module: Module, folder: str, chip: Chip) -> dict[str, Kernel]:
  """The kernels of a program.

  Args:
    module: the program.
    folder: that `schedule.dump_flags` named when it was compiled.
    chip: that it was compiled for.

  Returns:
    Name of the instruction that is scheduled -> its kernel. That may be a
    fusion, of the kernel with what writes its result into a larger array.
  """
  found = {}
  for name in module.runs:
    for index, call in enumerate(module.computations[name]):
      if call.target == KERNEL:
        place = module.window(name, index)
        there = module.computations[place.computation][place.start]
        found[there.name] = _read(module, name, call, there.name, folder, chip)
  return found


def stated(instruction: Instruction) -> tuple[int, int]:
  """(FLOPs, bytes) of `pallas_call(cost_estimate=...)`; 0 where it has none."""

  def number(field):
    found = re.search(rf'"{field}":"(\d+)"', instruction.line)
    return int(found[1]) if found else 0

  return number("flops"), number("bytes_accessed")


def _read(
  module: Module,
  where: str,
  call: Instruction,
  scheduled: str,
  folder: str,
  chip: Chip,
) -> Kernel:
  name = _base(call)
  flops, num_bytes = stated(call)
  seconds, by = flops / chip.peak_flops, "FLOPs" if flops else "nothing"
  bundles, program = None, None
  try:
    program = _schedule(module, where, call, scheduled, folder)
    scalars = _scalars(module, where, call, name)
    runs = [
      schedule_run.run(program, scalars, core) for core in range(chip.cores)
    ]
  except (FileNotFoundError, ValueError):
    runs = []  # no such file, or a loop whose end is data
  unknown = frozenset().union(*(run.unknown for run in runs))
  # A copy of unknown size, or that may not be, is no bundle more.
  if program and runs and not unknown & program.branches.keys():
    bundles = max(run.bundles for run in runs)
    seconds, by = bundles / chip.bundles_per_second, "schedule"
    if not unknown:
      num_bytes = sum(run.read_bytes + run.written_bytes for run in runs)
  moving = num_bytes / chip.hbm_bytes_per_second
  if moving > seconds:
    seconds, by = moving, "HBM"
  return Kernel(
    name=name,
    seconds=seconds,
    by=by,
    bundles=bundles,
    hbm_bytes=num_bytes,
    flops=flops,
  )


def _base(call: Instruction) -> str:
  """A kernel's name without what the compiler adds."""
  return re.sub(r"(\.\d+|\.clone)+$", "", call.name)


def _schedule(
  module: Module, where: str, call: Instruction, scheduled: str, folder: str
) -> schedule.Schedule:
  """A kernel's schedule; the compiler writes that of equal kernels once."""
  shapes = lambda where, call: (
    _base(call), call.shape, module.operand_shapes(where, call)
  )  # fmt: skip
  wanted, dumped = shapes(where, call), schedule.names(folder)
  names = [scheduled] + [
    other.name
    for there in module.runs
    for other in module.computations[there]
    if other.target == KERNEL and shapes(there, other) == wanted
  ]
  written = [name for name in names if name in dumped]
  return schedule.read(folder, (written or names)[0])


def _scalars(
  module: Module, where: str, call: Instruction, name: str
) -> dict[int, list[int]]:
  """Operand -> words, of what a kernel reads before it starts."""
  if name not in _SCALARS:
    return {}
  values = importlib.import_module(_SCALARS[name]).one_segment(
    [shape.dims for shape in module.operand_shapes(where, call)]
  )
  words = {}
  for i, value in enumerate(values):
    shape = module.shape(where, call.operands[i])
    layout = re.search(r"\{([^}]*)\}", shape)
    words[i] = words_in_memory(value, layout[1] if layout else "")
  return words
