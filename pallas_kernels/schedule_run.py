"""How often each bundle of a kernel runs, by running its scalar program.

Which branches a kernel takes (first step of a row, tile that the mask empties,
last step) depends on grid indices and on prefetched scalars only. Those are in
the schedule as a few scalar instructions, and running just them, with vectors
left out, gives the bundles that a whole kernel issues and the bytes that it
copies: exactly, with no word from the kernel's author, and for another's kernel
as well as for ours.

What depends on data (a vector, a scalar that nobody gave) is unknown. A branch
on it is not taken, so that what it guards runs, and it is listed in
`Run.unknown`: the counts are then what the kernel needs at most.
"""

import collections
import dataclasses
from typing import NamedTuple

from pallas_kernels.schedule import DELAY, MXU, Region, Schedule
from pallas_kernels.schedule_ops import Pointer, add, compute, parse_bundle

GRANULE = 32  # bytes; in which the sizes of copies are given


class Step(NamedTuple):
  """One kind of grid step: its bundles, and the branches that it takes.

  Attributes:
    bundles: that it issues.
    entered: (first bundle of a region that a branch guards, times run), ...
  """

  bundles: int
  entered: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Run:
  """What a kernel does in one call, on one core.

  Attributes:
    counts: how often each bundle runs.
    steps: kinds of grid steps -> how many there are. The compiler pipelines
      the grid: one or two further steps at its ends only copy.
    read_bytes: copied from HBM.
    written_bytes: copied to HBM.
    unknown: bundles whose branch or copy depends on what is not known.
  """

  counts: list[int]
  steps: collections.Counter
  read_bytes: int
  written_bytes: int
  unknown: frozenset[int]

  @property
  def bundles(self) -> int:
    """Bundles of the whole kernel."""
    return sum(self.counts)

  def filled(self, schedule: Schedule, unit: str) -> int:
    """Slots of a unit that the whole kernel fills."""
    column = schedule.column(unit)
    return sum(count * slots for count, slots in zip(self.counts, column))

  def core(self, schedule: Schedule) -> Region:
    """The innermost region with more than half of the kernel's matmuls."""
    column = schedule.column(MXU)

    def done(region):
      span = range(region.start, region.stop)
      return sum(self.counts[i] * column[i] for i in span)

    region = schedule.regions()
    half = done(region) / 2
    while inside := [r for r in region.inside if done(r) > half]:
      (region,) = inside
    return region

  @property
  def steady(self) -> Step:
    """The kind of step that most of the kernel's bundles belong to."""
    return max(self.steps, key=lambda step: step.bundles * self.steps[step])


def run(
  schedule: Schedule,
  scalars: dict[int, list[int]] | None = None,
  core: int = 0,
  limit: int = 50_000_000,
) -> Run:
  """Runs the scalar program of a kernel.

  Args:
    schedule: the kernel.
    scalars: operand -> its 32-bit words, as they lie in memory, of those that
      the kernel reads before it starts (`num_scalar_prefetch`, and before
      those the bounds of the grid that are traced).
    core: which of two cores it runs on: they may share out the grid.
    limit: of scalar instructions.

  Raises:
    ValueError: it did not end within the limit, or a loop's end is unknown.
  """
  return _Machine(schedule, scalars or {}, core).run(limit)


class _Machine:
  """The scalar unit: named values, and the memory of scalars."""

  def __init__(self, schedule, scalars, core=0):
    self.schedule = schedule
    self.scalars = scalars
    self.values = {}  # name -> (value, when it was written)
    self.memory = {Pointer("#allocation0", 0): core}
    self.unknown = set()
    self.bytes = {"hbm_to_vmem": 0, "vmem_to_hbm": 0}
    self.now = 0
    self.program = [parse_bundle(bundle.text) for bundle in schedule.bundles]
    # Bundles at which there is something to do; all others just pass.
    self.next = [len(self.program)] * (len(self.program) + 1)
    for i in reversed(range(len(self.program))):
      busy = self.program[i] or i in schedule.branches
      self.next[i] = i if busy else self.next[i + 1]

  def run(self, limit) -> Run:
    size = len(self.program)
    difference = [0] * (size + 1)  # of the counts of neighbours
    steps = _Steps(self.schedule)
    start = at = 0
    while start < size:
      at = self.next[at]
      if at >= size:
        difference[start] += 1
        steps.pass_over(start, size)
        break
      self.execute(self.program[at], at)
      if self.now > limit:
        raise ValueError(f"{self.schedule.name}: runs on after {limit} steps")
      branch = self.schedule.branches.get(at)
      if branch is None:
        at += 1
        continue
      taken = self.taken(branch)
      end = at + 1 + DELAY
      for late in range(at + 1, end):
        self.execute(self.program[late], late)
      difference[start] += 1
      difference[end] -= 1
      steps.pass_over(start, end)
      start = at = branch.to if taken else end
      steps.arrive(branch, taken)
    counts, running = [], 0
    for change in difference[:size]:
      running += change
      counts.append(running)
    return Run(
      counts=counts,
      steps=steps.done(),
      read_bytes=self.bytes["hbm_to_vmem"],
      written_bytes=self.bytes["vmem_to_hbm"],
      unknown=frozenset(self.unknown),
    )

  def taken(self, branch) -> bool:
    if not branch.predicate:
      return True
    value = self.value(branch.predicate)
    if value is None:
      self.unknown.add(branch.at)
      if branch.to <= branch.at:
        raise ValueError(
          f"{self.schedule.name}: how often the loop at bundle {branch.to}"
          " runs depends on data; give the scalars that it reads"
        )
      return False
    return bool(value)

  def value(self, operand):
    if not isinstance(operand, str):
      return operand
    value = self.values.get(operand.lstrip("!"), (None, 0))[0]
    return not value if value is not None and operand[0] == "!" else value

  def write(self, name, value):
    self.now += 1
    self.values[name] = (value, self.now)

  def execute(self, ops, at):
    # Where a loop begins all of its values change at the same time. A value
    # lies in one register throughout: what was written last is there.
    arriving = [
      (
        op.out,
        max((self.values.get(x, (None, 0)) for x in op.inputs), key=_age),
      )
      for op in ops
      if op.name == "sphi"
    ]
    for name, (value, _) in arriving:
      self.write(name, value)
    for op in ops:
      if op.name == "sphi":
        continue
      if op.guard:
        guard = self.value(op.guard)
        if guard is None:
          if op.name.startswith("dma."):
            self.unknown.add(at)
          elif op.otherwise:
            self.write(op.out, None)
            continue
        elif bool(guard) == op.negated:
          if op.otherwise:
            self.write(op.out, self.value(op.otherwise))
          continue
      self.act(op, at)

  def act(self, op, at):
    kind = op.name.split(".")[0]
    if kind == "sld":
      address = self.address(op.inputs)
      self.write(op.out, None if address is None else self.memory.get(address))
    elif kind == "sst":
      *parts, stored = op.inputs
      address = self.address(parts)
      if address is not None:
        self.memory[address] = self.value(stored)
    elif kind == "operand":
      self.write(op.out, *self.scalars.get(op.inputs[0], (None,))[:1])
    elif kind == "dma" and "_to_" in op.name:
      self.copy(op, at)
    else:
      inputs = [self.value(x) for x in op.inputs]
      self.write(op.out, compute(op.name, inputs))

  def address(self, parts):
    found = Pointer("", 0)
    for part in map(self.value, parts):
      if part is None:
        return None
      found = add(found, part)
    return found

  def copy(self, op, at):
    source, size, target, *_ = [self.value(x) for x in op.inputs]
    way = op.name.split(".")[1]
    if way in self.bytes:
      if isinstance(size, int):
        self.bytes[way] += size * GRANULE
      else:
        self.unknown.add(at)
    elif way.endswith("_to_smem") and isinstance(target, Pointer):
      # What lay there before is gone, whether the new words are known or not.
      for place in [p for p in self.memory if p.base == target.base]:
        del self.memory[place]
      whole = isinstance(source, Pointer) and source.offset == 0
      if whole and source.base.startswith("operand"):
        words = self.scalars.get(int(source.base[len("operand") :]), ())
        for i, word in enumerate(words):
          self.memory[Pointer(target.base, i)] = word


class _Steps:
  """Counts the kinds of steps of the outermost loop that runs most bundles."""

  def __init__(self, schedule):
    self.loops = list(_outermost_loops(schedule.regions()))
    self.found = {r.start: collections.Counter() for r in self.loops}
    self.bundles, self.entered = 0, collections.Counter()

  def pass_over(self, start, stop):
    # A loop is entered from above without a branch: the step starts there.
    for loop in self.loops:
      if start < loop.start < stop:
        self.reset()
        self.bundles = stop - loop.start
        return
    self.bundles += stop - start

  def arrive(self, branch, taken):
    for loop in self.loops:
      if branch.to == loop.start and branch.at >= loop.start:
        self.found[loop.start][self.step()] += 1
        self.reset()
        return
    if not taken and branch.to > branch.at:
      self.entered[branch.at + 1 + DELAY] += 1

  def step(self):
    return Step(self.bundles, tuple(sorted(self.entered.items())))

  def reset(self):
    self.bundles, self.entered = 0, collections.Counter()

  def done(self):
    counted = [steps for steps in self.found.values() if steps]
    if not counted:
      return collections.Counter([self.step()])
    return max(
      counted, key=lambda steps: sum(s.bundles * n for s, n in steps.items())
    )


def _outermost_loops(region):
  for inside in region.inside:
    if inside.kind == "loop":
      yield inside
    else:
      yield from _outermost_loops(inside)


def _age(value_and_time):
  return value_and_time[1]
