"""Reads the collectives out of compiled HLO: what, how much, between whom.

A TPU's compiler writes one in several forms: as an instruction, as a pair of
start and done, as the start, middle and done of a fusion with compute in
between, and a reduce-scatter as a fusion around an all-reduce. Each counts
once.
"""

import dataclasses
import math
import re
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from sharding import collectives as costs

# Kind -> bytes that a device sends, of (bytes of the whole array, devices).
KINDS = {
  "all-reduce": costs.all_reduce_bytes,
  "all-gather": costs.all_gather_bytes,
  "reduce-scatter": costs.reduce_scatter_bytes,
  "all-to-all": costs.all_to_all_bytes,
  "collective-permute": costs.permute_bytes,
}
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_INSTRUCTION = re.compile(
  r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?)"
  r" (?P<opcode>[a-z][\w-]*)\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """One collective of a program, as one device sees it.

  Attributes:
    kind: one of `KINDS`.
    operands: the arrays that a device puts in, a call.
    axes: the mesh axes along which its groups differ.
    group_size: devices that talk to each other.
    times: calls in a run of the program.
    in_loop: whether it stands inside the body of a `while`.
    in_branch: whether it stands inside a branch of a `conditional`.
    asynchronous: whether other work is scheduled while it runs.
    hidden_cycles: the compiler's estimate of that work, a call. What runs at
      the same time counts the same work.
  """

  kind: str
  operands: tuple[Shape, ...]
  axes: frozenset[str]
  group_size: int
  times: int
  in_loop: bool
  in_branch: bool
  asynchronous: bool
  hidden_cycles: int

  @property
  def num_elements(self) -> int:
    """Of its operands, a call."""
    return sum(math.prod(shape.dims) for shape in self.operands)

  @property
  def bytes_sent(self) -> float:
    """That a device sends in a run of the program, by the cost formula."""
    whole = sum(shape.num_bytes for shape in self.operands)
    if self.kind == "all-gather":
      whole *= self.group_size
    return self.times * KINDS[self.kind](whole, self.group_size)


def collectives(hlo: str, mesh: Mesh) -> list[Collective]:
  """Returns all collectives of a compiled program over `mesh`.

  Branches of a conditional all count.

  Args:
    hlo: `compiled.as_text()`.
    mesh: the devices, in the order of the program's partitions.

  Raises:
    ValueError: a collective stands in a loop whose number of iterations is
      not in the program.
  """
  module = _Module(hlo)
  found = []
  for name, runs in module.runs.items():
    computation = module.computations[name]
    for index, instruction in enumerate(computation):
      kind = instruction.opcode.removesuffix("-start")
      if kind not in KINDS or not module.counts(name):
        continue
      if runs.times is None:
        raise ValueError(
          f"%{instruction.name} stands in a loop of an unknown number of"
          " iterations: give the loop a fixed length"
        )
      if name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
      groups = _groups(instruction.line, mesh.size)
      between = module.between(name, index)
      found.append(
        Collective(
          kind=kind,
          operands=module.operand_shapes(name, instruction),
          axes=_axes(groups, mesh),
          group_size=len(groups[0]),
          times=runs.times,
          in_loop=runs.in_loop,
          in_branch=runs.in_branch,
          asynchronous=between is not None,
          hidden_cycles=sum(map(module.cycles, between or ())),
        )
      )
  return found


def summary(found: list[Collective]) -> dict[str, list[int]]:
  """Adds collectives up: "kind dtypes over axes" -> [calls, bytes sent]."""
  table = {}
  for op in found:
    dtypes = "+".join(sorted({shape.dtype for shape in op.operands}))
    key = f"{op.kind} {dtypes} over {' '.join(sorted(op.axes)) or 'nothing'}"
    calls, sent = table.get(key, (0, 0))
    table[key] = [calls + op.times, sent + round(op.bytes_sent)]
  return dict(sorted(table.items()))


class _Instruction(NamedTuple):
  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  line: str

  def called(self, *attributes: str) -> list[str]:
    """The computations that these attributes name."""
    pattern = rf"\b(?:{'|'.join(attributes)})=(?:%?([\w.-]+)|\{{([^}}]*)\}})"
    return [
      name.strip(" %")
      for one, several in re.findall(pattern, self.line)
      for name in (one or several).split(",")
    ]


class _Runs(NamedTuple):
  """How often a computation runs; None: unknown."""

  times: int | None
  in_loop: bool
  in_branch: bool


class _Module:
  """The text of a program, taken apart."""

  def __init__(self, hlo: str):
    self.computations: dict[str, list[_Instruction]] = {}
    self.runs: dict[str, _Runs] = {}
    # Computation that a fusion or an asynchronous call runs -> (caller's
    # name, index of the call in it).
    self._callers: dict[str, tuple[str, int]] = {}
    name = entry = None
    for line in hlo.splitlines():
      if head := re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{$", line):
        name = head[2]
        entry = name if head[1] else entry
        self.computations[name] = []
      elif name and (match := _INSTRUCTION.match(line)):
        operands = tuple(re.findall(r"%([\w.-]+)", match["operands"]))
        self.computations[name].append(
          _Instruction(
            match["name"], match["shape"], match["opcode"], operands, line
          )
        )
    assert entry is not None, "no ENTRY in this text"
    self._shapes = {
      name: {instruction.name: instruction.shape for instruction in lines}
      for name, lines in self.computations.items()
    }
    self._visit(entry, _Runs(1, False, False))

  def _visit(self, name: str, runs: _Runs) -> None:
    """Notes how often a computation runs, and what it calls."""
    known = self.runs.get(name)
    if known is not None:
      whole = None not in (known.times, runs.times)
      times = known.times + runs.times if whole else None
      in_loop = known.in_loop or runs.in_loop
      in_branch = known.in_branch or runs.in_branch
      self.runs[name] = _Runs(times, in_loop, in_branch)
    else:
      self.runs[name] = runs
    for index, instruction in enumerate(self.computations[name]):
      if instruction.opcode == "while":
        trips = self._trips(instruction)
        whole = None not in (trips, runs.times)
        times = runs.times * trips if whole else None
        inner = _Runs(times, True, runs.in_branch)
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

  def _trips(self, loop: _Instruction) -> int | None:
    """Iterations of a loop that counts up from 0 to a constant.

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
      return None
    return math.ceil(limits[0] / self._step(loop))

  def _step(self, loop: _Instruction) -> int:
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

  def operand_shapes(
    self, name: str, instruction: _Instruction
  ) -> tuple[Shape, ...]:
    """The arrays that an instruction of a computation takes."""
    shapes = self._shapes[name]
    return tuple(
      Shape(dtype, tuple(int(n) for n in dims.split(",") if n))
      for operand in instruction.operands
      for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes[operand])
    )

  def between(self, name: str, index: int) -> list[_Instruction] | None:
    """What is scheduled from the start of a collective to its end.

    Returns:
      Those instructions; None: it has no start and end, or none between.
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
      if name in self._callers:
        caller, at = self._callers[name]
        if self.computations[caller][at].opcode == "async-start":
          name, index, instruction = caller, at, self.computations[caller][at]
      if not instruction.opcode.endswith("-start"):
        return None
      ends = lambda other: (
        other.opcode.endswith("-done") and instruction.name in other.operands
      )
    later = self.computations[name][index + 1 :]
    length = next(i for i, other in enumerate(later) if ends(other))
    free = ("get-tuple-element", "bitcast", "parameter", "constant", "tuple")
    between = [other for other in later[:length] if other.opcode not in free]
    return between or None

  def cycles(self, instruction: _Instruction) -> int:
    """The compiler's estimate for an instruction, loops included."""
    if instruction.opcode == "while":
      body = self.computations[instruction.called("body")[0]]
      return (self._trips(instruction) or 1) * sum(map(self.cycles, body))
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.line)
    return int(cycles[1]) if cycles else 0


def _iota(dims: str, order: str | None) -> np.ndarray:
  """0, 1, ... in the shape `dims`, transposed, flat."""
  ids = np.arange(math.prod(map(int, dims.split(","))))
  ids = ids.reshape([int(n) for n in dims.split(",")])
  if order:
    ids = ids.transpose([int(n) for n in order.split(",")])
  return ids.reshape(-1)


def _groups(line: str, num_devices: int) -> list[list[int]]:
  """The devices that talk to each other, in any of XLA's four notations."""
  listed = re.search(
    r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", line
  )
  if listed:
    groups = re.findall(r"\{([\d,]+)\}", listed[1])
    return [[int(n) for n in group.split(",")] for group in groups]
  if "replica_groups={}" in line:
    return [list(range(num_devices))]
  if tiled := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={_IOTA}", line):
    ids = _iota(tiled[3], tiled[4])
    return ids.reshape(int(tiled[1]), int(tiled[2])).tolist()
  named = re.search(
    r"replica_groups=mesh\[([^\]]*)\]"
    rf"(?:, device_ids=\({_IOTA}\))? \{{([^}}]*)\}}",
    line,
  )
  assert named, f"unknown notation of groups: {line}"
  sizes, dims, order, along = named.groups()
  sizes = dict(re.findall(r"'(\w+)'=(\d+)", sizes))
  ids = _iota(dims or str(num_devices), order)
  ids = ids.reshape([int(n) for n in sizes.values()])
  moved = [list(sizes).index(axis) for axis in re.findall(r"'(\w+)'", along)]
  ids = np.moveaxis(ids, moved, range(-len(moved), 0))
  size = math.prod(ids.shape[-len(moved) :])
  return ids.reshape(-1, size).tolist()


def _axes(groups: list[list[int]], mesh: Mesh) -> frozenset[str]:
  """The mesh axes along which any group's devices differ."""
  axes = set()
  for group in groups:
    places = np.array(np.unravel_index(group, mesh.devices.shape)).T
    differ = (places != places[:1]).any(axis=0)
    axes |= {mesh.axis_names[i] for i in np.flatnonzero(differ)}
  return frozenset(axes)
