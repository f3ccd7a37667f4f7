"""Reads the collectives out of compiled HLO: what, how much, between whom."""

import dataclasses
import math
import re

import numpy as np
from jax.sharding import Mesh

KINDS = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
_INSTRUCTION = re.compile(
  rf"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ({'|'.join(KINDS)})(?:-start)?\("
)
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


@dataclasses.dataclass(frozen=True)
class Collective:
  """One instruction.

  Attributes:
    kind: one of `KINDS`.
    num_elements: of its results on one device.
    axes: the mesh axes along which its groups differ.
    in_loop: whether it stands inside the body of a `while`.
  """

  kind: str
  num_elements: int
  axes: frozenset[str]
  in_loop: bool


def collectives(hlo: str, mesh: Mesh) -> list[Collective]:
  """Returns all collectives of a compiled program over `mesh`."""
  found = []
  computations = _computations(hlo)
  looped = _in_loops(computations)
  for name, lines in computations.items():
    for line in lines:
      if match := _INSTRUCTION.match(line):
        shapes, kind = match.groups()
        axes = _axes(_groups(line, mesh.size), mesh)
        count = _num_elements(shapes)
        found.append(Collective(kind, count, axes, name in looped))
  return found


def _computations(hlo: str) -> dict[str, list[str]]:
  """Splits a module's text: name of each computation -> its lines."""
  result, name = {}, None
  for line in hlo.splitlines():
    if head := re.match(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
      name = head[1]
      result[name] = []
    elif name is not None:
      result[name].append(line)
  return result


def _in_loops(computations: dict[str, list[str]]) -> set[str]:
  """The computations that a loop runs, however deep."""
  calls = {
    name: {other for other in _names(lines) if other in computations}
    for name, lines in computations.items()
  }
  todo = [
    name
    for lines in computations.values()
    for line in lines
    for name in re.findall(r"(?:body|condition)=%?([\w.-]+)", line)
  ]
  looped = set()
  while todo:
    name = todo.pop()
    if name not in looped:
      looped.add(name)
      todo += calls[name]
  return looped


def _names(lines: list[str]) -> set[str]:
  """All words that could name another computation."""
  return {word for line in lines for word in re.findall(r"%([\w.-]+)", line)}


def _num_elements(shapes: str) -> int:
  """Elements of a result "f32[3,4]{1,0}" or a tuple of such."""
  return sum(
    math.prod(int(n) for n in dims.split(",") if n)
    for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)
  )


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
