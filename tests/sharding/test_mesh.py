"""Meshes: sizes by arithmetic, and every way to ask for the wrong ones."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels.aot import topology_devices
from sharding.axes import MESH_AXES, MeshConfig
from sharding.mesh import axis_sizes, make_mesh


def test_all_axes_in_order_and_auto():
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  assert mesh.axis_names == MESH_AXES
  assert mesh.devices.shape == (1, 2, 2, 1, 1, 2)
  assert set(mesh.axis_types) == {AxisType.Auto}


def test_the_last_axis_takes_neighbours():
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  ids = np.vectorize(lambda device: device.id)(mesh.devices)
  assert ids.reshape(4, 2).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
  "config, want",
  [
    (MeshConfig(), {"fsdp": 8}),
    (MeshConfig(data=-1, fsdp=1), {"data": 8}),
    (MeshConfig(tensor=2), {"fsdp": 4, "tensor": 2}),
    (MeshConfig(data=2, fsdp=1, tensor=-1), {"data": 2, "tensor": 4}),
  ],
)
def test_minus_one_takes_the_rest(config, want):
  sizes = axis_sizes(config, 8)
  assert {axis: size for axis, size in sizes.items() if size > 1} == want


def test_given_devices_and_a_mesh_smaller_than_the_machine():
  last = jax.devices()[-1:]
  assert make_mesh(MeshConfig(), devices=last).devices.flat[0] == last[0]
  assert make_mesh(MeshConfig(fsdp=2)).size == 2


@pytest.mark.parametrize(
  "config, parts",
  [
    (
      MeshConfig(data=4, fsdp=1, tensor=4),
      ["data=4 x tensor=4 = 16 devices", "there are 8", "CPU_DEVICES=16"],
    ),
    (MeshConfig(tensor=3), ["mesh.fsdp=-1", "8 devices", "tensor=3 = 3"]),
    (MeshConfig(data=-1), ["mesh.data=-1 and mesh.fsdp=-1"]),
    (MeshConfig(fsdp=0), ["mesh.fsdp must be at least 1", "got 0"]),
    (MeshConfig(tensor=-2), ["mesh.tensor must be at least 1", "got -2"]),
  ],
)
def test_mistakes_are_explained(config, parts):
  with pytest.raises(ValueError) as error:
    make_mesh(config)
  for part in parts:
    assert part in str(error.value)


def test_the_advice_for_emulating_devices_works():
  """The setting that the error names is one that JAX reads."""
  assert "jax_num_cpu_devices" in jax.config.values


@dataclasses.dataclass(frozen=True)
class Stub:
  """What the layout of a mesh asks of a device."""

  id: int
  slice_index: int
  platform: str = "cpu"
  device_kind: str = "stub"
  process_index: int = 0


def stubs(*sizes: int) -> list[Stub]:
  """Slices of so many devices."""
  slices = [i for i, size in enumerate(sizes) for _ in range(size)]
  return [Stub(i, index) for i, index in enumerate(slices)]


def crossing(mesh) -> set[str]:
  """The axes along which a step leads to another slice."""
  index = np.vectorize(lambda device: device.slice_index)(mesh.devices)
  return {
    axis
    for dim, axis in enumerate(mesh.axis_names)
    if (np.diff(index, axis=dim) != 0).any()
  }


@pytest.mark.parametrize(
  "config, devices, want",
  [
    (MeshConfig(data=2, fsdp=4), stubs(4, 4), {"data"}),
    (MeshConfig(data=4, fsdp=1, tensor=2), stubs(4, 4), {"data"}),
    (MeshConfig(pipeline=2, data=2, fsdp=2), stubs(4, 4), {"pipeline"}),
    (
      MeshConfig(pipeline=2, data=2, fsdp=2),
      stubs(2, 2, 2, 2),
      {"pipeline", "data"},
    ),
    (MeshConfig(pipeline=4, fsdp=2), stubs(4, 4), {"pipeline"}),
    # All of one slice.
    (MeshConfig(fsdp=4), stubs(4, 4), set()),
  ],
)
def test_only_pipeline_and_data_cross_slices(config, devices, want):
  mesh = make_mesh(config, devices=devices)
  assert mesh.axis_names == MESH_AXES
  assert crossing(mesh) == want
  used = [device.id for device in mesh.devices.flat]
  assert sorted(used) == list(range(mesh.size))


@pytest.mark.parametrize(
  "config, devices, parts",
  [
    (
      MeshConfig(fsdp=8),
      stubs(4, 4),
      ["2 slices of 4", "mesh.data=1", "multiple of 2"],
    ),
    (
      MeshConfig(data=2, fsdp=4),
      stubs(2, 2, 2, 2),
      ["4 slices of 2", "mesh.data=2", "multiple of 4"],
    ),
    (MeshConfig(data=2, fsdp=3), stubs(4, 4), ["equally many", "[2, 4]"]),
  ],
)
def test_meshes_that_would_cross_slices(config, devices, parts):
  with pytest.raises(ValueError) as error:
    make_mesh(config, devices=devices)
  for part in parts:
    assert part in str(error.value)


@pytest.mark.tpu_compiler
def test_slices_of_a_real_topology():
  devices = topology_devices("v5e:2x2", num_slices=2)
  mesh = make_mesh(MeshConfig(data=2, tensor=2), devices=devices)
  assert crossing(mesh) == {"data"}
