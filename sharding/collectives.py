"""Collectives inside a `shard_map`, each with the bytes that a device sends.

M is the size in bytes of the whole array: what a device puts into all_reduce,
reduce_scatter, all_to_all and permute, and what it gets from all_gather. N is
the number of devices along the axis. The formulas are those of the ring
algorithms (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", section 3), which no algorithm undercuts.
"""

from collections.abc import Sequence

import jax


def all_reduce(x: jax.Array, axis: str) -> jax.Array:
  """The sum of `x` over an axis, on all its devices."""
  return jax.lax.psum(x, axis)


def all_gather(x: jax.Array, axis: str, *, dim: int) -> jax.Array:
  """The parts `x` of an axis's devices, joined along a dim, on all."""
  return jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def reduce_scatter(x: jax.Array, axis: str, *, dim: int) -> jax.Array:
  """Each device's part, along a dim, of the sum of `x` over an axis."""
  return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(
  x: jax.Array, axis: str, *, split_dim: int, join_dim: int
) -> jax.Array:
  """Sends each device its part of `x` and joins what comes.

  Args:
    x: whole along `split_dim`, a part along `join_dim`.
    axis: the mesh axis.
    split_dim: afterwards a part.
    join_dim: afterwards whole.
  """
  return jax.lax.all_to_all(x, axis, split_dim, join_dim, tiled=True)


def permute(
  x: jax.Array, axis: str, pairs: Sequence[tuple[int, int]]
) -> jax.Array:
  """Sends `x` from place to place along an axis; zeros where none comes.

  Args:
    x: any array.
    axis: the mesh axis.
    pairs: (source, target), each place at most once as either.
  """
  return jax.lax.ppermute(x, axis, pairs)


def all_reduce_bytes(num_bytes: float, num_devices: int) -> float:
  """2 (N-1)/N M: a reduce-scatter, then an all-gather."""
  return 2 * (num_devices - 1) / num_devices * num_bytes


def all_gather_bytes(num_bytes: float, num_devices: int) -> float:
  """(N-1)/N M: all parts but one pass through each device."""
  return (num_devices - 1) / num_devices * num_bytes


def reduce_scatter_bytes(num_bytes: float, num_devices: int) -> float:
  """(N-1)/N M: an all-gather backwards, with sums."""
  return (num_devices - 1) / num_devices * num_bytes


def all_to_all_bytes(num_bytes: float, num_devices: int) -> float:
  """(N-1)/N M: each device keeps one part of its own."""
  return (num_devices - 1) / num_devices * num_bytes


def permute_bytes(num_bytes: float, num_devices: int) -> float:
  """M, of a device that sends."""
  del num_devices
  return num_bytes


def zero_bytes(num_bytes: float, num_devices: int, *, stage: int) -> float:
  """Bytes that a device sends in a step of ZeRO (arXiv:1910.02054, section 7).

  Stages 0 (data parallel), 1 and 2 move gradients to their sums and updated
  parameters back, 2 (N-1)/N M. Stage 3 gathers parameters for the forward and
  again for the backward pass and scatters gradients: 1.5 times as much.

  Args:
    num_bytes: of all parameters, and as much of all gradients.
    num_devices: N.
    stage: 0 to 3.

  Raises:
    ValueError: there is no such stage.
  """
  gather = all_gather_bytes(num_bytes, num_devices)
  scatter = reduce_scatter_bytes(num_bytes, num_devices)
  match stage:
    case 0:
      return all_reduce_bytes(num_bytes, num_devices)
    case 1 | 2:
      return scatter + gather
    case 3:
      return gather + gather + scatter
  raise ValueError(f"ZeRO has the stages 0 to 3, got {stage}")
