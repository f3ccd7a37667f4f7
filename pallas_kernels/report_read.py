"""From a compiled case to the figures of its parts."""

import dataclasses
import re

import numpy as np

from pallas_kernels import schedule, schedule_run
from pallas_kernels.report_case import Case, Part
from pallas_kernels.report_chips import Chip

_TILED = re.compile(r"T\((?:(\d+),)?(\d+)\)(?:\((\d+),1\))?")


@dataclasses.dataclass(frozen=True)
class Figures:
  """What the schedule says of one direction of an op; sums over its kernels.

  Attributes:
    part: "forward" or "backward".
    blocks: block sizes.
    steps: grid steps, by their count of bundles: {bundles: how many}.
    steady_bundles: of the kind of grid step that takes most of the time.
    kernel_bundles: of whole kernels; of the slower core where there are two.
    occupancy: share of the MXU's slots filled, over whole kernels.
    fills, spills: vector registers read back and stored by whole kernels.
    core_bundles: of the code that does most of the matmuls: the innermost loop
      or branch with more than half of those of the heaviest kernel.
    core_occupancy: of the MXU in it, from its first matmul to its last.
    core_fills, core_spills: in it, each time it runs.
    vmem_bytes: of the kernel that needs most.
    hbm_bytes: copied by the kernels.
    schedule_us: bundles at the chip's clock.
    hbm_us: bytes at the chip's bandwidth.
    peak_us: useful FLOPs at the chip's peak. A bundle may start more than the
      matrix units can take in a cycle: the schedule of a plain XLA matmul
      on v5e would be 1.18 times the peak.
    useful_flops: of the part.
    unknown: branches and copies that depend on data, and are counted as done.
  """

  part: str
  blocks: dict[str, int]
  steps: dict[int, int]
  steady_bundles: int
  kernel_bundles: int
  occupancy: float
  fills: int
  spills: int
  core_bundles: int
  core_occupancy: float
  core_fills: int
  core_spills: int
  vmem_bytes: int
  hbm_bytes: int
  schedule_us: float
  hbm_us: float
  peak_us: float
  useful_flops: float
  unknown: int

  @property
  def flops_per_bundle(self) -> float:
    return self.useful_flops / self.kernel_bundles

  @property
  def bound_us(self) -> float:
    return max(self.schedule_us, self.hbm_us, self.peak_us)

  def as_json(self) -> dict:
    return dataclasses.asdict(self) | dict(
      flops_per_bundle=self.flops_per_bundle, bound_us=self.bound_us
    )


def read_case(case: Case, folder: str, hlo: str, chip: Chip) -> list[Figures]:
  """Reads what the compilation of a case has left in a folder.

  Args:
    case: that was compiled.
    folder: of the dump, which holds nothing else.
    hlo: text of the compiled program, with layouts.
    chip: that it was compiled for.

  Raises:
    ValueError: a kernel of the case is not in the dump.
  """
  return [_read_part(case, part, folder, hlo, chip) for part in case.parts]


def outside(case: Case, folder: str) -> tuple[int, int]:
  """(bundles, HBM bytes) of all that the program does beside its kernels.

  What XLA puts around them, such as sums of partial gradients, also of the
  function that the case differentiates.
  """
  ours = [kernel for part in case.parts for kernel in part.kernels]
  bundles = moved = 0
  for name in dict.fromkeys(schedule.names(folder)):
    # TLP is the program that calls the others.
    if name == "TLP" or name.startswith("<") or _is_one_of(name, ours):
      continue
    run = schedule_run.run(schedule.read(folder, name))
    bundles += run.bundles
    moved += run.read_bytes + run.written_bytes
  return bundles, moved


def _is_one_of(name, kernels) -> bool:
  """Whether the compiler made a name of that of a kernel."""
  return any(re.fullmatch(rf"{kernel}(\.\d+)*", name) for kernel in kernels)


def _read_part(case, part, folder, hlo, chip) -> Figures:
  dumped = schedule.names(folder)
  runs, hbm_bytes = [], 0
  for kernel in part.kernels:
    found = [name for name in dumped if _is_one_of(name, [kernel])]
    if not found:
      raise ValueError(f"no kernel {kernel!r} was compiled, but {dumped}")
    for name in found:
      program = schedule.read(folder, name)
      scalars = _scalars(part, kernel, name, hlo)
      cores = [
        schedule_run.run(program, scalars, core) for core in range(chip.cores)
      ]
      runs.append((program, max(cores, key=lambda run: run.bundles)))
      hbm_bytes += sum(run.read_bytes + run.written_bytes for run in cores)
  bundles = sum(run.bundles for _, run in runs)
  heaviest, heaviest_run = max(runs, key=lambda pair: pair[1].bundles)
  core = heaviest_run.core(heaviest)
  span = core.start, core.stop
  steps = {}
  for step, times in heaviest_run.steps.items():
    steps[step.bundles] = steps.get(step.bundles, 0) + times
  slots = sum(run.bundles * p.capacity[schedule.MXU] for p, run in runs)
  total = lambda unit: sum(run.filled(p, unit) for p, run in runs)
  return Figures(
    part=part.name,
    blocks={name: case.blocks[name] for name in part.blocks or case.blocks},
    steps=dict(sorted(steps.items())),
    steady_bundles=heaviest_run.steady.bundles,
    kernel_bundles=bundles,
    occupancy=total(schedule.MXU) / slots,
    fills=total(schedule.FILL),
    spills=total(schedule.SPILL),
    core_bundles=core.bundles,
    core_occupancy=heaviest.matmul_occupancy(*span),
    core_fills=heaviest.filled(schedule.FILL, *span),
    core_spills=heaviest.filled(schedule.SPILL, *span),
    vmem_bytes=max(program.vmem_bytes for program, _ in runs),
    hbm_bytes=hbm_bytes,
    schedule_us=bundles / chip.bundles_per_second * 1e6,
    hbm_us=hbm_bytes / chip.hbm_bytes_per_second * 1e6,
    peak_us=part.useful_flops / chip.peak_flops * 1e6,
    useful_flops=part.useful_flops,
    unknown=sum(len(run.unknown) for _, run in runs),
  )


def _scalars(part: Part, kernel: str, name: str, hlo: str):
  """Operand -> words, of the scalars of a kernel that the case has given."""
  operands = re.search(rf"%{re.escape(name)} = .*? custom-call\((.*?)\)", hlo)
  if not operands:
    return {}
  operands = re.findall(r"%[\w.\-]+", operands[1])
  words = {}
  for i, array in enumerate(part.scalars.get(kernel, ())):
    made = re.search(
      rf"{re.escape(operands[i])} = \w+\[[\d,]*\]\{{([^}}]*)\}}", hlo
    )
    words[i] = words_in_memory(np.asarray(array), made[1] if made else "")
  return words


def words_in_memory(array: np.ndarray, layout: str) -> list[int]:
  """The 32-bit words of an array as a TPU holds it.

  Args:
    array: of integers of 8, 16 or 32 bits.
    layout: of the compiled program: "2,1,0:T(8,128)(4,1)". The two minor
      dimensions are cut into tiles of 8 x 128; 4 rows share a word.

  Raises:
    ValueError: the layout is of another kind.
  """
  *lead, rows, columns = (1,) * (2 - array.ndim) + array.shape
  order = ",".join(map(str, reversed(range(array.ndim))))
  tile = _TILED.search(layout)
  packed = 4 // array.dtype.itemsize
  if not tile or layout.split(":")[0] != order or packed != int(tile[3] or 1):
    raise ValueError(f"cannot lay out {array.dtype}{array.shape} as {layout!r}")
  high, wide = int(tile[1] or 1), int(tile[2])
  padded = np.zeros(
    (int(np.prod(lead)), -(-rows // high) * high, -(-columns // wide) * wide),
    array.dtype,
  )
  padded[:, :rows, :columns] = array.reshape(-1, rows, columns)
  tiles = padded.reshape(
    len(padded), -1, high // packed, packed, padded.shape[2] // wide, wide
  )
  # [lead, row of tiles, column of tiles, row, column, row in the word]
  lying = np.ascontiguousarray(tiles.transpose(0, 1, 4, 2, 5, 3))
  return lying.view(np.int32).reshape(-1).tolist()
