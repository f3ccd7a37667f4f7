"""The text of a compiled program, taken apart: what runs, when, how often.

A program is a list of computations, each a list of instructions in the order in
which they are scheduled. What one calls, and how often a loop runs its body, is
in the instructions.
"""

import math
import re
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_INSTRUCTION = re.compile(
  r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?)"
  r" (?P<opcode>[a-z][\w-]*)\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
# What costs nothing: names for what is there.
FREE = ("get-tuple-element", "bitcast", "parameter", "constant", "tuple")


class Shape(NamedTuple):
  """One array: "f32" and (3, 4)."""

  dtype: str
  dims: tuple[int, ...]

  @property
  def num_bytes(self) -> int:
    """Without the padding of a layout."""
    digits = re.search(r"\d+", self.dtype)
    bits = _BITS.get(self.dtype) or int(digits[0])
    return math.prod(self.dims) * bits // 8


class Window(NamedTuple):
  """Indices in a computation: where something starts, and where it has ended.

  What is not asynchronous starts and ends at the same index.
  """

  computation: str
  start: int
  stop: int


class Instruction(NamedTuple):
  """One line of a computation.

  Attributes:
    name: without "%".
    shape: of its result, with the layout.
    opcode: "fusion", "while", ...
    operands: names of instructions.
    line: the whole text.
  """

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  line: str

  @property
  def cycles(self) -> int:
    """The compiler's estimate of itself; 0 where it gives none."""
    cycles = re.search(r'"estimated_cycles":"(\d+)"', self.line)
    return int(cycles[1]) if cycles else 0

  @property
  def op_name(self) -> str:
    """The path of name scopes and primitives that it is from, or ""."""
    found = re.search(r'op_name="([^"]*)"', self.line)
    return found[1] if found else ""

  @property
  def target(self) -> str:
    """What a custom call calls, or ""."""
    found = re.search(r'custom_call_target="([^"]*)"', self.line)
    return found[1] if found else ""

  def called(self, *attributes: str) -> list[str]:
    """The computations that these attributes name."""
    pattern = rf"\b(?:{'|'.join(attributes)})=(?:%?([\w.-]+)|\{{([^}}]*)\}})"
    return [
      name.strip(" %")
      for one, several in re.findall(pattern, self.line)
      for name in (one or several).split(",")
    ]


class Runs(NamedTuple):
  """How often a computation runs; None: unknown."""

  times: int | None
  in_loop: bool
  in_branch: bool


class Module:
  """The text of a program, taken apart.

  Attributes:
    computations: name -> instructions, in the order of the schedule.
    entry: name of the computation that the program starts with.
    runs: computation -> how often it runs.
    header: the lines before the first computation.
  """

  def __init__(self, hlo: str, *, unknown_trips: int | None = None):
    """Reads `compiled.as_text()`.

    Args:
      hlo: the text.
      unknown_trips: iterations of loops that the program itself ends.
    """
    self._unknown_trips = unknown_trips
    self.computations: dict[str, list[Instruction]] = {}
    self.runs: dict[str, Runs] = {}
    # Computation that a fusion or an asynchronous call runs -> (caller's
    # name, index of the call in it).
    self._callers: dict[str, tuple[str, int]] = {}
    self.header: list[str] = []
    name = entry = None
    for line in hlo.splitlines():
      if head := re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{$", line):
        name = head[2]
        entry = name if head[1] else entry
        self.computations[name] = []
      elif name is None:
        self.header.append(line)
      elif match := _INSTRUCTION.match(line):
        operands = tuple(re.findall(r"%([\w.-]+)", match["operands"]))
        self.computations[name].append(
          Instruction(
            match["name"], match["shape"], match["opcode"], operands, line
          )
        )
    assert entry is not None, "no ENTRY in this text"
    self._shapes = {
      name: {instruction.name: instruction.shape for instruction in lines}
      for name, lines in self.computations.items()
    }
    self.entry = entry
    self._visit(entry, Runs(1, False, False))

  def _visit(self, name: str, runs: Runs) -> None:
    """Notes how often a computation runs, and what it calls."""
    known = self.runs.get(name)
    if known is not None:
      whole = None not in (known.times, runs.times)
      times = known.times + runs.times if whole else None
      in_loop = known.in_loop or runs.in_loop
      in_branch = known.in_branch or runs.in_branch
      self.runs[name] = Runs(times, in_loop, in_branch)
    else:
      self.runs[name] = runs
    for index, instruction in enumerate(self.computations[name]):
      if instruction.opcode == "while":
        trips = self.trips(instruction)
        whole = None not in (trips, runs.times)
        times = runs.times * trips if whole else None
        inner = Runs(times, True, runs.in_branch)
        self._visit(instruction.called("body")[0], inner)
      elif not instruction.opcode.endswith(("-update", "-done")):
        inner = runs
        if instruction.opcode == "conditional":
          inner = runs._replace(in_branch=True)
        for called in instruction.called(
          "calls",
          "to_apply",
          "branch_computations",
          "true_computation",
          "false_computation",
        ):
          self._callers[called] = name, index
          self._visit(called, inner)

  def trips(self, loop: Instruction) -> int | None:
    """Iterations of a loop that counts up from 0 to a constant.

    Of others `unknown_trips`; None: not known.

    JAX's loops count by one. XLA's own, in which parts of a matmul's operand
    go round while others are multiplied, count by as much as they unroll.
    """
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.line):
      return int(known[1])
    condition = self.computations[loop.called("condition")[0]]
    limits = [
      int(limit[1])
      for instruction in condition
      if (
        limit := re.search(
          r"= [su]32\[\]\S* constant\((\d+)\)", instruction.line
        )
      )
    ]
    if len(limits) != 1:
      return self._unknown_trips
    return math.ceil(limits[0] / self._step(loop))

  def _step(self, loop: Instruction) -> int:
    """What an iteration of a loop adds to its counter."""
    condition = self.computations[loop.called("condition")[0]]
    counters = [
      re.search(r"index=(\d+)", instruction.line)[1]
      for instruction in condition
      if instruction.opcode == "get-tuple-element"
    ]
    body = self.computations[loop.called("body")[0]]
    found = {instruction.name: instruction for instruction in body}
    if len(counters) == 1:
      counter = found.get(body[-1].operands[int(counters[0])])
      if counter is not None and counter.opcode == "add":
        for operand in counter.operands:
          value = re.search(r" constant\((\d+)\)", found[operand].line)
          if value:
            return int(value[1])
    return 1

  def _has(self, name: str, target: str) -> bool:
    return any(
      f'custom_call_target="{target}"' in instruction.line
      for instruction in self.computations[name]
    )

  def counts(self, name: str) -> bool:
    """Whether collectives in a computation are not copies of another's.

    A TPU's asynchronous collective is written in the fusion that starts it,
    in those that compute beside it, and in the one that ends it.
    """
    if name not in self._callers or name.startswith("all-reduce-scatter"):
      return True
    caller, index = self._callers[name]
    if self.computations[caller][index].opcode != "fusion":
      return True
    return self._has(name, "AsyncCollectiveStart")

  def shape(self, name: str, instruction: str) -> str:
    """The shape of an instruction of a computation, as text with layouts."""
    return self._shapes[name][instruction]

  def operand_shapes(
    self, name: str, instruction: Instruction
  ) -> tuple[Shape, ...]:
    """The arrays that an instruction of a computation takes."""
    shapes = self._shapes[name]
    return tuple(
      shape
      for operand in instruction.operands
      for shape in self.arrays(shapes[operand])
    )

  @staticmethod
  def arrays(text: str) -> tuple[Shape, ...]:
    """The arrays in a shape, which may be a tuple."""
    return tuple(
      Shape(dtype, tuple(int(n) for n in dims.split(",") if n))
      for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", text)
    )

  def between(self, name: str, index: int) -> list[Instruction] | None:
    """What is scheduled from the start of a collective to its end.

    Returns:
      Those instructions; None: it has no start and end, or none between.
    """
    name, start, stop = self.window(name, index)
    inside = self.computations[name][start + 1 : stop]
    return [other for other in inside if other.opcode not in FREE] or None

  def window(self, name: str, index: int) -> Window:
    """Where an instruction starts and ends, as the schedule sees it.

    A fusion, or an asynchronous call, stands for what is in it.
    """
    instruction = self.computations[name][index]
    if self._has(name, "AsyncCollectiveStart"):
      # The copy of the collective in the fusion that ends it.
      channel = re.search(r"channel_id=\d+", instruction.line)[0]
      name, index = self._callers[name]
      ends = lambda other: any(
        self._has(called, "AsyncCollectiveDone")
        and any(
          copy.opcode == instruction.opcode and f"{channel}," in copy.line
          for copy in self.computations[called]
        )
        for called in other.called("calls")
      )
    else:
      while name in self._callers:
        caller, at = self._callers[name]
        instruction = self.computations[caller][at]
        if instruction.opcode not in ("fusion", "async-start"):
          instruction = self.computations[name][index]
          break
        name, index = caller, at
      if not instruction.opcode.endswith("-start"):
        return Window(name, index, index)
      ends = lambda other: (
        other.opcode.endswith("-done") and instruction.name in other.operands
      )
    later = self.computations[name][index + 1 :]
    length = next(i for i, other in enumerate(later) if ends(other))
    return Window(name, index, index + 1 + length)

  def cycles(self, instruction: Instruction) -> int:
    """The compiler's estimate for an instruction, loops included."""
    if instruction.opcode == "while":
      body = self.computations[instruction.called("body")[0]]
      return (self.trips(instruction) or 1) * sum(map(self.cycles, body))
    return instruction.cycles
