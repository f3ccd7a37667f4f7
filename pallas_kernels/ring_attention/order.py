"""Which rows of a sequence each device of a ring holds."""

import jax
import jax.numpy as jnp
import numpy as np

ORDERS = ("contiguous", "zigzag")


def rows_of(order: str, num_devices: int, device, num_rows: int) -> jax.Array:
  """The numbers of a device's rows, int32 [num_rows].

  Args:
    order: "contiguous": device d holds the d-th part. "zigzag": of twice as
      many parts as devices, the d-th from the start and the d-th from the end,
      so that each device has as much to do under a causal mask
      (arXiv:2407.21783, section 3.3.2).
    num_devices: in the ring.
    device: number of the device, an int or int32 scalar.
    num_rows: of a device.

  Raises:
    ValueError: the order is unknown or cannot split `num_rows`.
  """
  count = lambda first, size: first + jnp.arange(size, dtype=jnp.int32)
  if order == "contiguous":
    return count(device * num_rows, num_rows)
  if order != "zigzag":
    raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
  if num_rows % 2:
    raise ValueError(
      f"order 'zigzag' needs an even number of rows a device, got {num_rows};"
      " change the length or the order"
    )
  half = num_rows // 2
  return jnp.concatenate(
    [
      count(device * half, half),
      count((2 * num_devices - 1 - device) * half, half),
    ]
  )


def permutation(order: str, num_devices: int, length: int) -> np.ndarray:
  """How to lay out a sequence so that equal parts are what devices hold.

  Returns:
    int [length]: row i of the new sequence is that row of the old.

  Raises:
    ValueError: the length does not divide.
  """
  if length % num_devices:
    raise ValueError(
      f"a length of {length} does not divide by {num_devices} devices"
    )
  size = length // num_devices
  with jax.ensure_compile_time_eval():  # Values, also while a caller is traced.
    parts = [rows_of(order, num_devices, d, size) for d in range(num_devices)]
    return np.concatenate(parts)
