"""A compiled program's time on one device, from its schedule.

The compiler gives each instruction its cycles; a loop multiplies them by its
trips; kernels, of which it knows nothing, come from `plan/kernels.py`. What is
asynchronous, a collective or a copy between memories, takes its bytes over the
bandwidth and runs beside what is scheduled between its start and its end; what
that does not cover is waited for. What shares a link takes turns.

Left out: the latency of a link, the memory traffic of fusions beside that of
copies, and links that are still busy when a loop starts.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plan.links import group_rate
from plan.scopes import Scopes
from sharding.hlo import Collective
from sharding.hlo_text import FREE, Instruction, Module

_HOST = "S(5)"  # how a layout marks the memory of the host
_HBM = "HBM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
  """How fast a device is.

  Attributes:
    clock: cycles a second.
    hbm: bytes a second, to and from it.
    links: mesh axis -> bytes a second that a device sends along it.
  """

  clock: float
  hbm: float
  links: Mapping[str, float]


@dataclasses.dataclass
class Timeline:
  """Seconds of one device.

  Attributes:
    seconds: from start to end.
    compute: of all instructions that work, kernels included.
    copies: spent waiting for copies between HBM and the memory on the chip.
    waits: mesh axes -> seconds spent waiting for their collectives.
    sent: mesh axes -> seconds of their collectives, waited for or not.
    busy: mesh axis -> seconds in which collectives use it.
    ops: `plan.scopes.Scope` -> seconds of its instructions.
    kernels: instruction that calls one -> calls.
    host_bytes: that travel to and from the host's memory, which is given no
      time: no maker publishes that rate.
  """

  seconds: float = 0.0
  compute: float = 0.0
  copies: float = 0.0
  waits: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  sent: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  busy: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  ops: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  kernels: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  host_bytes: float = 0.0

  def add(self, other: "Timeline", times: int = 1) -> None:
    """Appends another, so many times."""
    for field in dataclasses.fields(self):
      ours, theirs = getattr(self, field.name), getattr(other, field.name)
      if isinstance(ours, collections.Counter):
        for key, value in theirs.items():
          ours[key] += times * value
      else:
        setattr(self, field.name, ours + times * theirs)


class Times(NamedTuple):
  """Bounds of a step, and the estimate between them.

  Attributes:
    hidden: seconds with all communication beside other work.
    estimate: with what the schedule has beside other work.
    exposed: with none.
  """

  hidden: float
  estimate: float
  exposed: float


def times(
  module: Module,
  found: Sequence[Collective],
  rates: Rates,
  kernels: Mapping[str, float],
) -> tuple[Times, Timeline]:
  """A program's seconds.

  Args:
    module: the program.
    found: its collectives, of `sharding.hlo.collectives`.
    rates: of the device.
    kernels: name of an instruction that calls a kernel -> its seconds.

  Returns:
    The bounds with the estimate, and the timeline that this is from.
  """
  timeline = _Walk(module, found, rates, kernels).run(module.entry)
  alone = _Walk(module, (), rates, kernels).run(module.entry)
  links = max(timeline.busy.values(), default=0.0)
  hidden = max(alone.seconds, links)
  estimate = max(timeline.seconds, links)
  exposed = alone.seconds + timeline.sent.total()
  return Times(hidden, estimate, exposed), timeline


class _Started(NamedTuple):
  """What runs beside other work: its end in seconds, and what waits for it."""

  end: float
  axes: frozenset[str] | None  # None: a copy


class _Walk:
  """Goes through a program in the order of its schedule."""

  def __init__(self, module, found, rates, kernels):
    self.module, self.rates, self.kernels = module, rates, kernels
    self.scopes = Scopes(module)
    self.known: dict[str, Timeline] = {}
    self.starts = collections.defaultdict(list)
    for op in found:
      self.starts[op.window.computation, op.window.start].append(op)

  def run(self, name: str) -> Timeline:
    """The timeline of one run of a computation."""
    if name not in self.known:
      self.known[name] = self._walk(name)
    return self.known[name]

  def _walk(self, name) -> Timeline:
    line = Timeline()
    free = collections.Counter()  # resource -> when it is free again
    ends = collections.defaultdict(list)
    for index, instruction in enumerate(self.module.computations[name]):
      for started in ends.pop(index, ()):
        self._wait(line, started)
      for op in self.starts[name, index]:
        seconds = op.bytes_sent / op.times if op.times else 0.0
        seconds /= group_rate(self.rates.links, op.axes) if op.axes else 1.0
        started = _begin(line.seconds, seconds, free, op.axes)
        line.sent[op.axes] += seconds
        for axis in op.axes:
          line.busy[axis] += seconds
        if op.window.stop == index:
          self._wait(line, started)
        else:
          ends[op.window.stop].append(started)
      if self._copies(name, index):
        self._copy(line, name, index, free, ends)
      else:
        self._work(line, instruction)
    return line

  def _wait(self, line: Timeline, started: _Started) -> None:
    seconds = max(0.0, started.end - line.seconds)
    line.seconds += seconds
    if started.axes is None:
      line.copies += seconds
    elif seconds:
      line.waits[started.axes] += seconds

  def _copies(self, name, index) -> bool:
    instruction = self.module.computations[name][index]
    return instruction.opcode in ("copy-start", "slice-start")

  def _copy(self, line, name, index, free, ends) -> None:
    """A copy between memories, which begins here."""
    instruction = self.module.computations[name][index]
    shapes = self.module.arrays(instruction.shape)
    size = min(shape.num_bytes for shape in shapes[:2])
    if _HOST in instruction.shape:
      line.host_bytes += size
      return
    started = _begin(line.seconds, size / self.rates.hbm, free, None)
    ends[self.module.window(name, index).stop].append(started)

  def _work(self, line: Timeline, instruction: Instruction) -> None:
    """What an instruction does itself, with all that it calls."""
    opcode = instruction.opcode
    if opcode in FREE:
      return
    if opcode == "while":
      trips = self.module.trips(instruction)
      line.add(self.run(instruction.called("body")[0]), trips or 1)
    elif opcode == "conditional":
      branches = instruction.called(
        "branch_computations", "true_computation", "false_computation"
      )
      longest = max(map(self.run, branches), key=lambda found: found.seconds)
      line.add(longest)
    elif opcode == "call":
      line.add(self.run(instruction.called("to_apply")[0]))
    else:
      seconds = self.kernels.get(instruction.name)
      if seconds is None:
        seconds = instruction.cycles / self.rates.clock
      else:
        line.kernels[instruction.name] += 1
      line.seconds += seconds
      line.compute += seconds
      if seconds:
        line.ops[self.scopes.of(instruction)] += seconds


def _begin(now, seconds, free, axes) -> _Started:
  """Takes a link, or the memory, as soon as it is free."""
  used = [_HBM] if axes is None else list(axes)
  end = max([now, *(free[one] for one in used)]) + seconds
  for one in used:
    free[one] = end
  return _Started(end, axes)
