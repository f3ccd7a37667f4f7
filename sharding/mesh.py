"""Devices in a grid with named axes."""

import math
from collections.abc import Sequence

import jax
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

  Args:
    config: devices along each axis.
    devices: the devices to arrange; None: all of them.

  Raises:
    ValueError: see `axis_sizes`.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = axis_sizes(config, len(devices))
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
    devices=devices[: math.prod(sizes.values())],
  )
