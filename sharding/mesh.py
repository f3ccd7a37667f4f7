"""Devices in a grid with named axes."""

import math
from collections import Counter
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from sharding.axes import MESH_AXES, MeshConfig


def axis_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
  """Resolves -1 and checks the sizes against the number of devices.

  Args:
    config: devices wanted along each axis.
    num_devices: devices there are.

  Returns:
    Mesh axis -> size, outermost first.

  Raises:
    ValueError: a size is neither positive nor -1, two are -1, or the product
      does not fit.
  """
  sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
  for axis, size in sizes.items():
    if size < 1 and size != -1:
      raise ValueError(
        f"mesh.{axis} must be at least 1, or -1 for the remaining devices;"
        f" got {size}"
      )
  rest = [axis for axis, size in sizes.items() if size == -1]
  if len(rest) > 1:
    raise ValueError(
      "only one mesh axis may be -1 (the remaining devices); got "
      + " and ".join(f"mesh.{axis}=-1" for axis in rest)
    )
  fixed = math.prod(size for size in sizes.values() if size != -1)
  asked = " x ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1)
  if fixed > num_devices:
    raise ValueError(
      f"the mesh asks for {asked} = {fixed} devices, but there are"
      f" {num_devices}. Lower one of these settings, or emulate devices on the"
      f" CPU: JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={fixed}"
    )
  if rest:
    if num_devices % fixed:
      raise ValueError(
        f"mesh.{rest[0]}=-1 takes the remaining devices, but {num_devices}"
        f" devices do not divide by {asked} = {fixed}"
      )
    sizes[rest[0]] = num_devices // fixed
  return sizes


def make_mesh(
  config: MeshConfig,
  *,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Returns a mesh with all of `MESH_AXES`; unused ones have size 1.

  Axes are Auto: XLA propagates shardings from the inputs, the outputs and a
  few constraints. A mesh smaller than the machine takes the first devices.

  Of TPU slices, which slower links join, `pipeline` and `data` go from one to
  the next; the other axes, which talk in every layer, stay inside.

  Args:
    config: devices along each axis.
    devices: the devices to arrange; None: all of them.

  Raises:
    ValueError: an axis that must not would cross slices, or see `axis_sizes`.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = axis_sizes(config, len(devices))
  devices = devices[: math.prod(sizes.values())]
  axis_types = (AxisType.Auto,) * len(sizes)
  # Only TPUs have slices.
  slices = Counter(getattr(device, "slice_index", 0) for device in devices)
  if len(slices) == 1:
    return jax.make_mesh(
      tuple(sizes.values()),
      tuple(sizes),
      axis_types=axis_types,
      devices=devices,
    )
  across = _across_slices(sizes, slices)
  inside = [size // across.get(axis, 1) for axis, size in sizes.items()]
  grid = mesh_utils.create_hybrid_device_mesh(
    inside, [across.get(axis, 1) for axis in sizes], devices
  )
  return Mesh(grid, tuple(sizes), axis_types=axis_types)


def _across_slices(
  sizes: dict[str, int], slices: Counter[int]
) -> dict[str, int]:
  """Returns how many times each axis goes from slice to slice."""
  num_slices = len(slices)
  pipeline = math.gcd(sizes["pipeline"], num_slices)
  data = num_slices // pipeline
  if len(set(slices.values())) > 1:
    raise ValueError(
      "a mesh over TPU slices takes equally many devices of each; this one"
      f" takes {sorted(slices.values())}. Change the sizes of config.mesh, or"
      " the slices"
    )
  if sizes["data"] % data:
    raise ValueError(
      f"the devices are {num_slices} slices of {slices.most_common()[0][1]},"
      " with slow links between them, over which only mesh.pipeline and"
      f" mesh.data may go; got mesh.pipeline={sizes['pipeline']} and"
      f" mesh.data={sizes['data']}. Make mesh.data a multiple of {data}, and"
      " another axis smaller"
    )
  return {"pipeline": pipeline, "data": data}
