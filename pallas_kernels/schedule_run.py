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
import re
from typing import NamedTuple

from pallas_kernels.schedule import DELAY, MXU, Region, Schedule

GRANULE = 32  # bytes; in which the sizes of copies are given
_WORD = 1 << 32

_INSTRUCTION = re.compile(r"\s*(%\w+) = ([a-z_]\w*(?:\.\w+)*)\s*(.*)", re.S)
_GUARD = re.compile(r"(?:\[thread:\$\d+\]\s*)?\((!?)(%\w+)(?:, (%\w+))?\),? *")
_OPERAND = re.compile(r"index: (\d+)")
_THREAD = re.compile(r"\[thread:\$\d+\]\s*")


class Pointer(NamedTuple):
  """An address: `offset` words (or bytes) into the memory `base`."""

  base: str
  offset: int


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


class _Op(NamedTuple):
  name: str
  out: str
  negated: bool
  guard: str  # the predicate that it waits for, or ""
  otherwise: str  # the value that `out` has where it does not run, or ""
  inputs: tuple  # of int, Pointer or the name of a value


def run(
  schedule: Schedule,
  scalars: dict[int, list[int]] | None = None,
  limit: int = 50_000_000,
) -> Run:
  """Runs the scalar program of a kernel.

  Args:
    schedule: the kernel.
    scalars: operand -> its 32-bit words, as they lie in memory, of those that
      the kernel reads before it starts (`num_scalar_prefetch`, and before
      those the bounds of the grid that are traced).
    limit: of scalar instructions.

  Raises:
    ValueError: it did not end within the limit, or a loop's end is unknown.
  """
  return _Machine(schedule, scalars or {}).run(limit)


class _Machine:
  """The scalar unit: named values, and the memory of scalars."""

  def __init__(self, schedule, scalars):
    self.schedule = schedule
    self.scalars = scalars
    self.values = {}  # name -> (value, when it was written)
    self.memory = {Pointer("#allocation0", 0): 0}  # the index of the core
    self.unknown = set()
    self.bytes = {"hbm_to_vmem": 0, "vmem_to_hbm": 0}
    self.now = 0
    self.program = [_parse_bundle(bundle.text) for bundle in schedule.bundles]
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
      self.act(op)

  def act(self, op):
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
      self.copy(op)
    else:
      inputs = [self.value(x) for x in op.inputs]
      self.write(op.out, _compute(op.name, inputs))

  def address(self, parts):
    found = Pointer("", 0)
    for part in map(self.value, parts):
      if part is None:
        return None
      found = _add(found, part)
    return found

  def copy(self, op):
    source, size, target, *_ = [self.value(x) for x in op.inputs]
    way = op.name.split(".")[1]
    if way in self.bytes:
      self.bytes[way] += size * GRANULE
    elif way in ("vmem_to_smem", "hbm_to_smem"):
      if isinstance(source, Pointer) and isinstance(target, Pointer):
        if source.base.startswith("operand"):
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


def _parse_bundle(text) -> list[_Op]:
  """The instructions of a bundle that scalars or copies depend on."""
  ops = []
  for part in text.split(";;"):
    match = _INSTRUCTION.match(part)
    if not match:
      continue
    out, name, rest = match.groups()
    if name.startswith("inlined_call_operand"):
      index = int(_OPERAND.search(rest)[1])
      # A scalar, as a bound of the grid, arrives in a register.
      scalar = rest.startswith(".<no memory space> [shape: s32[]")
      name = "operand" if scalar else "smov.u32"
      given = index if scalar else Pointer(f"operand{index}", 0)
      ops.append(_Op(name, out, False, "", "", (given,)))
      continue
    scalar = out.startswith(("%s", "%p")) and not name.startswith("v")
    if not scalar and name.split(".")[0] not in ("sst", "dma"):
      continue
    guard = _GUARD.match(rest)
    negated, predicate, otherwise = False, "", ""
    if guard:
      negated, predicate = bool(guard[1]), guard[2]
      otherwise = guard[3] or ""
      rest = rest[guard.end() :]
    rest = _THREAD.sub("", rest).replace("resolvable:$", "")
    inputs = tuple(map(_parse_operand, _operands(rest)))
    ops.append(_Op(name, out, negated, predicate, otherwise, inputs))
  return ops


def _operands(text) -> list[str]:
  """Words of an instruction: names, numbers, allocations."""
  text = re.sub(r"\[(true|false)\]", "", text)
  return re.findall(r"!?%\w+|#allocation\w+|\$?0x[0-9a-f]+|-?\b\d+\b", text)


def _parse_operand(word):
  if word.startswith("#"):
    return Pointer(word, 0)
  if word.startswith(("%", "!")):
    return word
  return _signed(int(word.lstrip("$"), 0))


def _signed(value: int) -> int:
  value %= _WORD
  return value - _WORD if value >= _WORD >> 1 else value


def _add(x, y):
  if isinstance(x, Pointer) and isinstance(y, Pointer):
    return Pointer(x.base + y.base, x.offset + y.offset)
  if isinstance(x, Pointer):
    return Pointer(x.base, x.offset + y)
  if isinstance(y, Pointer):
    return Pointer(y.base, x + y.offset)
  return _signed(x + y)


_COMPARE = {
  "eq": lambda x, y: x == y,
  "ne": lambda x, y: x != y,
  "lt": lambda x, y: x < y,
  "le": lambda x, y: x <= y,
  "gt": lambda x, y: x > y,
  "ge": lambda x, y: x >= y,
}
_INTEGERS = {
  "ssub": lambda x, y: x - y,
  "smul": lambda x, y: x * y,
  "sand": lambda x, y: x & y,
  "sor": lambda x, y: x | y,
  "sxor": lambda x, y: x ^ y,
  "smin": min,
  "smax": max,
  "sshra": lambda x, y: x >> (y % 32),
  "sshrl": lambda x, y: (x % _WORD) >> (y % 32),
  "sshll": lambda x, y: x << (y % 32),
}


def _compute(name, inputs):
  """The result of an instruction; None if it is not known."""
  kind, *modifiers = name.split(".")
  if kind in ("smov", "int_to_ptr") and len(inputs) == 1:
    return inputs[0]
  if kind == "scalar_select":
    return inputs[0] if inputs[0] is None else inputs[1 if inputs[0] else 2]
  if kind in ("por", "pand", "pnand", "pnor", "pxor", "pneg", "pmov"):
    return _logic(kind, inputs)
  if len(inputs) != 2 or None in inputs:
    return None
  x, y = inputs
  if kind in ("sadd", "scalar_lea"):
    return _add(x, y)
  if isinstance(x, Pointer) and kind == "sshll":
    return x  # a change of unit
  if isinstance(x, Pointer) or isinstance(y, Pointer):
    return None
  if kind == "scmp" and modifiers[1] in ("s32", "u32"):
    if modifiers[1] == "u32":
      x, y = x % _WORD, y % _WORD
    return _COMPARE[modifiers[0]](x, y)
  if kind in _INTEGERS:
    return _signed(_INTEGERS[kind](x, y))
  return None


def _logic(kind, inputs):
  """Of predicates, of which some may be unknown (None)."""
  if kind in ("pneg", "pmov"):
    (x,) = inputs
    return x if x is None or kind == "pmov" else not x
  if kind == "pxor":
    return None if None in inputs else inputs[0] != inputs[1]
  decisive = kind in ("por", "pnor")  # the value that alone decides
  if any(x is not None and bool(x) == decisive for x in inputs):
    known = decisive
  elif None in inputs:
    return None
  else:
    known = not decisive
  return known != (kind in ("pnand", "pnor"))
