"""Reads the collectives out of compiled HLO: what, how much, between whom.

A TPU's compiler writes one in several forms: as an instruction, as a pair of
start and done, as the start, middle and done of a fusion with compute in
between, and a reduce-scatter as a fusion around an all-reduce. Each counts
once.
"""

import dataclasses
import math
import re

import numpy as np
from jax.sharding import Mesh

from sharding import collectives as costs
from sharding.hlo_text import Module, Shape, Window

# Kind -> bytes that a device sends, of (bytes of the whole array, devices).
KINDS = {
  "all-reduce": costs.all_reduce_bytes,
  "all-gather": costs.all_gather_bytes,
  "reduce-scatter": costs.reduce_scatter_bytes,
  "all-to-all": costs.all_to_all_bytes,
  "collective-permute": costs.permute_bytes,
}
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


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
    window: where it starts and ends.
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
  window: Window = dataclasses.field(
    default=Window("", 0, 0), repr=False, compare=False
  )

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


def collectives(hlo: str | Module, mesh: Mesh) -> list[Collective]:
  """Returns all collectives of a compiled program over `mesh`.

  Branches of a conditional all count.

  Args:
    hlo: `compiled.as_text()`, or that taken apart.
    mesh: the devices, in the order of the program's partitions.

  Raises:
    ValueError: a collective stands in a loop whose number of iterations is
      not in the program.
  """
  module = Module(hlo) if isinstance(hlo, str) else hlo
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
          window=module.window(name, index),
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
