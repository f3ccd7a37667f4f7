"""The TPU's own compiler, without a TPU. It comes with the extra `plan`."""

import os

import numpy as np


def compile_for(topology: str, function, *args, num_devices: int = 1):
  """Compiles a function for devices that are not here.

  Args:
    topology: "v5e:2x2", "v5p:2x2x1", "v6e:2x2", ...
    function: of arrays; mapped to every device as it is.
    *args: `jax.ShapeDtypeStruct`s, or trees of them, without shardings.
    num_devices: of the topology, all of which hold all arrays.

  Returns:
    A `jax.stages.Compiled`: `memory_analysis()`, `cost_analysis()`,
    `as_text()`.

  Raises:
    ValueError: there is no such topology, or no libtpu.
  """
  import jax

  devices = np.array(topology_devices(topology)[:num_devices])
  mesh = jax.sharding.Mesh(devices, ("all",))
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  with jax.set_mesh(mesh):
    jitted = jax.jit(function, in_shardings=everywhere)
    return jitted.lower(*args).compile()


def topology_devices(topology: str, *, num_slices: int = 1) -> list:
  """The devices of a TPU topology, as descriptions to compile for.

  Args:
    topology: of one slice.
    num_slices: joined by the network of a data centre.

  Raises:
    ValueError: there is no such topology, or no libtpu.
  """
  # The library would ask a cloud for the machine's name, and wait.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  from jax.experimental import topologies

  try:
    found = topologies.get_topology_desc(
      platform="tpu", topology_name=topology, num_slices=num_slices
    )
  except Exception as error:  # what a plugin raises has no common type
    raise ValueError(
      f"cannot compile for {topology!r}; wanted a topology like 'v5e:2x2' and"
      ' libtpu (`pip install "onemesh[plan]"`)'
    ) from error
  return list(found.devices)
