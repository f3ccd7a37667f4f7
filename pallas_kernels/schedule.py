"""The static schedule of a TPU kernel, read from what the compiler dumps.

A TPU core issues one bundle (a very long instruction word) a cycle unless it
waits for memory, so that the bundles of a kernel, times how often each runs,
are its time when no DMA stalls it. The compiler writes the bundles when libtpu
is started with `dump_flags(folder)`; this module reads two of the files:

  *-KERNEL-NN-final_bundles.txt: the program. LB marks the head of a loop, PF
    where a branch lands, `sbr` branches. The program after a branch still runs
    for DELAY bundles. What is predicated without a branch always takes its
    bundle.
  *-KERNEL-NN-final_hlo-static-per-bundle-utilization.txt: how many slots of
    each unit (MATMUL, VALU, ...) each bundle fills, and how many there are.

Shown on the command line, without JAX:

  python -m pallas_kernels.schedule FOLDER [part of the kernel's name]

No source: the format is the compiler's own and has no public description; what
is said here was seen with libtpu 0.0.52 for v5e, v5p and v6e.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from absl import app

DELAY = 4  # bundles after a branch that run whether it is taken or not
MXU = "MATMUL"
FILL = "VLOAD:FILL"  # of a vector register, from memory
SPILL = "VSTORE:SPILL"

PROGRAM_ONLY = "^final_(bundles|hlo-static.*)$"

_PROGRAM = "final_bundles.txt"
_UNITS = "final_hlo-static-per-bundle-utilization.txt"
_MEMORY = "pre-finalize-registers-and-allocations.txt"
_FILE = re.compile(rf"(\d+)-(.+)-\d+-{re.escape(_PROGRAM)}")
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:[ >]*\{", re.M)
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_END = re.compile(r"End region (\d+)")
_BRANCH = re.compile(r"= sbr\.\w+ (?:\((!?%\w+)\) )?target = \$region(\d+)")
_VMEM = re.compile(r"#allocation\d+ \[.*space=vmem, size = (0x[0-9a-f]+)")


def dump_flags(folder: str, passes: str = ".*final.*") -> str:
  """What LIBTPU_INIT_ARGS must hold before JAX is imported.

  Args:
    folder: where the files go. They are those of the last pass only: all of
      them are 100 MB a kernel, and take most of the time of a compilation.
    passes: labels of files, a regular expression; `PROGRAM_ONLY` leaves out
      what tells `Schedule.vmem_bytes`.
  """
  return (
    f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    f" --xla_jf_dump_llo_pass_label_regex={passes}"
  )


class Bundle(NamedTuple):
  """One instruction word.

  Attributes:
    label: "LB", "PF", ... or "".
    text: its instructions, separated by ";;", without comments.
    slots: filled slots of each unit, in the order of `Schedule.capacity`.
  """

  label: str
  text: str
  slots: tuple[int, ...]


class Branch(NamedTuple):
  """A branch at bundle `at`, to bundle `to`; `predicate` as "!%p1_p2" or ""."""

  at: int
  to: int
  predicate: str


@dataclasses.dataclass
class Region:
  """Bundles that are repeated (a loop) or may be jumped over.

  Attributes:
    kind: "kernel", "loop" or "branch".
    start, stop: its bundles are range(start, stop).
    inside: the regions in it, in program order.
  """

  kind: str
  start: int
  stop: int
  inside: list["Region"] = dataclasses.field(default_factory=list)

  @property
  def bundles(self) -> int:
    return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A kernel.

  Attributes:
    name: as in the file's name.
    capacity: unit -> slots in one bundle, in the order of the file.
    bundles: the program.
    branches: bundle -> the branch in it.
    vmem_bytes: what the kernel allocates there for itself, windows, scratch
      and the compiler's own; operands that XLA keeps in VMEM not included.
  """

  name: str
  capacity: dict[str, int]
  bundles: list[Bundle]
  branches: dict[int, Branch]
  vmem_bytes: int

  def column(self, unit: str) -> list[int]:
    """Slots of a unit filled in each bundle."""
    at = list(self.capacity).index(unit)
    return [bundle.slots[at] for bundle in self.bundles]

  def filled(self, unit: str, start: int = 0, stop: int | None = None) -> int:
    """Slots of a unit filled in range(start, stop)."""
    return sum(self.column(unit)[start:stop])

  def occupancy(self, start: int = 0, stop: int | None = None) -> float:
    """Share of the MXU's slots filled in range(start, stop)."""
    column = self.column(MXU)[start:stop]
    return sum(column) / max(1, len(column) * self.capacity[MXU])

  def matmul_occupancy(self, start: int = 0, stop: int | None = None) -> float:
    """The same between the first and the last matmul in it."""
    column = self.column(MXU)[start:stop]
    busy = [i for i, slots in enumerate(column) if slots]
    if not busy:
      return 0.0
    return sum(column) / ((busy[-1] - busy[0] + 1) * self.capacity[MXU])

  def regions(self) -> Region:
    """The kernel with its loops and branches, nested."""
    root = Region("kernel", 0, len(self.bundles))
    found = []
    for at, to, _ in self.branches.values():
      after = at + 1 + DELAY
      found.append(
        Region("loop", to, after) if to <= at else Region("branch", after, to)
      )
    open_regions = [root]
    for region in sorted(found, key=lambda r: (r.start, -r.stop)):
      if region.bundles <= 0:
        continue
      while region.stop > open_regions[-1].stop:
        open_regions.pop()
        if not open_regions:
          raise ValueError(f"{self.name}: a branch leaves the kernel")
      open_regions[-1].inside.append(region)
      open_regions.append(region)
    return root


def names(folder: str) -> list[str]:
  """Kernels and fusions dumped in a folder, as they were compiled."""
  files = sorted(
    match.groups()
    for path in pathlib.Path(folder).iterdir()
    if (match := _FILE.fullmatch(path.name))
  )
  return [name for _, name in files]


def read(folder: str, name: str) -> Schedule:
  """Reads the latest kernel of a name.

  Args:
    folder: that `dump_flags` named.
    name: exactly as `names` gives it.

  Raises:
    FileNotFoundError: there is none of that name.
    ValueError: the files are not what this parser knows.
  """
  found = sorted(
    path
    for path in pathlib.Path(folder).iterdir()
    if (match := _FILE.fullmatch(path.name)) and match[2] == name
  )
  if not found:
    raise FileNotFoundError(
      f"{folder} holds no schedule of {name!r}, but of {names(folder)}"
    )
  stamp = found[-1].name.split("-")[0]

  def text(kind):
    beside = pathlib.Path(folder).glob(f"{stamp}-*")
    pattern = re.compile(rf"{re.escape(name)}-\d+-{re.escape(kind)}")
    match = [p for p in beside if pattern.fullmatch(p.name.split("-", 1)[1])]
    return match[-1].read_text() if match else ""

  return parse(name, text(_PROGRAM), text(_UNITS), text(_MEMORY))


def parse(name: str, program: str, units: str, memory: str = "") -> Schedule:
  """Reads a kernel from the text of its files.

  Args:
    name: for messages.
    program: of final_bundles.
    units: of final_hlo-static-per-bundle-utilization.
    memory: of pre-finalize-registers-and-allocations, "" if there is none.

  Raises:
    ValueError: the files do not belong together, or a branch lands nowhere.
  """
  capacity, slots = _parse_units(name, units)
  heads = list(_BUNDLE.finditer(program))
  if len(heads) != len(slots):
    raise ValueError(
      f"{name}: {len(heads)} bundles in the program, {len(slots)} in the"
      " utilization"
    )
  bundles, jumps, start_of, end_of = [], [], {}, {}
  ends = [head.start() for head in heads[1:]] + [len(program)]
  for i, (head, end) in enumerate(zip(heads, ends)):
    record = program[head.end() : end]
    text = _COMMENT.sub("", record)
    bundles.append(Bundle(head[1] or "", text[: text.rindex("}")], slots[i]))
    for number in _START.findall(record):
      start_of.setdefault(int(number), i)
    for number in _END.findall(record):
      end_of[int(number)] = i
    if jump := _BRANCH.search(text):
      jumps.append((i, int(jump[2]), jump[1] or ""))
  branches = {}
  for at, number, predicate in jumps:
    if number in start_of:
      to = start_of[number]
    elif number - 1 in end_of:  # what the branch jumps over
      to = end_of[number - 1] + 1
    else:
      raise ValueError(f"{name}: region {number}, a branch's aim, is not there")
    # A region "starts" with the first of its instructions, and those may have
    # been moved up, before the bundle where the branch lands.
    while not bundles[to].label:
      to += 1
    branches[at] = Branch(at, to, predicate)
  vmem = sum(int(size, 16) for size in _VMEM.findall(memory))
  return Schedule(name, capacity, bundles, branches, vmem)


def _parse_units(name, text):
  """The capacity (unit -> slots) and the filled slots of each bundle."""
  lines = text.splitlines()
  heads = [i for i, line in enumerate(lines) if line.startswith("==")]
  if len(heads) != 2:
    raise ValueError(f"{name}: not a utilization file: {text[:80]!r}")
  unit_names = [unit.strip() for unit in lines[heads[0] + 1].split(",")]
  capacity = dict(zip(unit_names, map(int, lines[heads[0] + 2].split())))
  rows = lines[heads[1] + 1 :]
  return capacity, [tuple(map(int, row.split())) for row in rows if row]


def tree(schedule: Schedule) -> Iterator[str]:
  """Lines that show a kernel's regions and what they fill."""
  units = list(schedule.capacity)
  capacity = ", ".join(f"{u} {n}" for u, n in schedule.capacity.items())
  yield (
    f"{schedule.name}: {len(schedule.bundles)} bundles,"
    f" {schedule.vmem_bytes / 2**20:.2f} MiB of VMEM; slots: {capacity}"
  )
  columns = [unit[-7:] for unit in units]
  yield (
    f"{'region':<36}{'bundles':>8}{'MXU':>7}{'(m-m)':>7}"
    + "".join(f"{column:>8}" for column in columns)
  )

  def show(region, depth):
    span = (region.start, region.stop)
    title = "  " * depth + f"{region.kind} {span[0]:#x}..{span[1] - 1:#x}"
    yield (
      f"{title:<36}{region.bundles:>8}{schedule.occupancy(*span):>7.1%}"
      f"{schedule.matmul_occupancy(*span):>7.1%}"
      + "".join(f"{schedule.filled(unit, *span):>8}" for unit in units)
    )
    for inner in region.inside:
      yield from show(inner, depth + 1)

  yield from show(schedule.regions(), 0)


def main(argv: list[str]) -> None:
  if len(argv) not in (2, 3):
    raise app.UsageError("wanted FOLDER [part of the kernel's name]")
  part = argv[2] if len(argv) == 3 else ""
  for name in dict.fromkeys(names(argv[1])):
    if part in name:
      print("\n".join(tree(read(argv[1], name))), end="\n\n")


if __name__ == "__main__":
  app.run(main)
