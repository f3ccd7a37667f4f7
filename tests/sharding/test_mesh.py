"""Meshes: sizes by arithmetic, and every way to ask for the wrong ones."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

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
