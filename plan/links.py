"""How fast the devices along a mesh axis talk. Imports no JAX."""

import itertools
import math
from collections.abc import Mapping, Sequence

from plan.chips import Chip, Topology
from sharding.axes import MESH_AXES

# A dim of a torus is closed to a ring where it is a multiple of this: v4 and
# v5p by optical switches between cubes of 4 x 4 x 4, v5e and v6e in a whole pod
# (cloud.google.com/tpu/docs, the page of each version).
_RING = {2: 16, 3: 4}


def axis_rates(machine: Topology, sizes: Mapping[str, int]) -> dict[str, float]:
  """Bytes a second that a device sends along each mesh axis, one way.

  On a torus an axis that fills dims of it has two links a dim, one where the
  dim is no ring; an axis that fills a part of a dim has one. What is last in
  the mesh takes dims first. On GPUs the last axes stay inside of a node, the
  others talk over the slow network. So do `pipeline` and `data` where they go
  from slice to slice.

  Args:
    machine: the devices.
    sizes: mesh axis -> devices along it.

  Returns:
    For axes of more than one device.
  """
  chip = machine.chip
  inner = [a for a in reversed(MESH_AXES) if sizes[a] > 1]
  if not chip.torus_dims:
    return _switched(chip, machine, inner, sizes)
  slow = _between_slices(machine, sizes)
  ring = _RING[chip.torus_dims]
  free = [(n, n % ring == 0) for n in machine.shape]
  rates = {}
  for axis in inner:
    size = sizes[axis] // slow.get(axis, 1)
    links = _take(free, size) if size > 1 else 0
    rates[axis] = links * chip.link_bytes_per_second
    if axis in slow:
      rates[axis] = chip.slow_bytes_per_second
  return rates


def group_rate(rates: Mapping[str, float], axes: Sequence[str]) -> float:
  """Of a collective over several axes at once: each adds its links.

  A slow network among them is the bottleneck of all.
  """
  each = [rates[axis] for axis in axes]
  return min(sum(each), len(each) * min(each))


def _between_slices(
  machine: Topology, sizes: Mapping[str, int]
) -> dict[str, int]:
  """How many times `pipeline` and `data` go from slice to slice."""
  pipeline = math.gcd(sizes["pipeline"], machine.num_slices)
  data = machine.num_slices // pipeline
  if sizes["data"] % data:
    raise ValueError(
      f"{machine.num_slices} slices: wanted mesh.data to be a multiple of"
      f" {data}, got {sizes['data']}; pipeline and data alone go from one slice"
      " to the next"
    )
  crossing = {"pipeline": pipeline, "data": data}
  return {axis: n for axis, n in crossing.items() if n > 1}


def _take(free: list[tuple[int, bool]], size: int) -> int:
  """Takes dims of a torus for an axis; returns the links that it has.

  Args:
    free: sizes of what is left, and whether it is a ring; changed.
    size: of the axis.
  """
  for count in range(1, len(free) + 1):
    for dims in itertools.combinations(range(len(free)), count):
      if math.prod(free[d][0] for d in dims) == size:
        taken = [free[d] for d in dims]
        free[:] = [item for d, item in enumerate(free) if d not in dims]
        return sum(2 if ring else 1 for _, ring in taken)
  # A part of a dim, or parts of several that it winds through.
  divides = [d for d, (n, _) in enumerate(free) if n % size == 0]
  for d in divides[:1] or range(len(free)):
    part = math.gcd(size, free[d][0])
    free[d], size = (free[d][0] // part, False), size // part
  return 1


def _switched(
  chip: Chip, machine: Topology, inner: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, float]:
  """GPUs: the fast network joins a node, the slow one all of them."""
  rates, together = {}, 1
  for axis in inner:
    together *= sizes[axis]
    inside = machine.slice_size % together == 0
    rates[axis] = (
      chip.fast_bytes_per_second if inside else chip.slow_bytes_per_second
    )
  return rates
