"""Which TPU a program is being traced for, and what its kernels may fill."""

import jax

_KINDS = {
  "TPU v4": "v4",
  "TPU v5 lite": "v5e",
  "TPU v5e": "v5e",
  "TPU v5": "v5p",
  "TPU v5p": "v5p",
  "TPU v6 lite": "v6e",
  "TPU v6e": "v6e",
}
# What a kernel may fill of a core's fast memory, MiB: less than there is.
VMEM = {"v4": 14, "v5e": 100, "v5p": 52, "v6e": 100}


def this_chip() -> str:
  """ "v5e" and the like: of the mesh in force (`jax.set_mesh`), else the
  devices here, else "v5e". Block sizes alone may depend on it."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  kind = device.device_kind if device else jax.devices()[0].device_kind
  return _KINDS.get(kind, "v5e")
