"""Sums over slow links in fewer bytes: int8, signs, or the largest entries.

`all_reduce` is for vectors inside a `shard_map`. A device owns one of N parts
of the sum: it gets that part of all devices encoded, adds up in float32, and
sends the sum encoded to all. So a vector crosses the wire twice, as in a ring
all-reduce, each time in the bytes of its format.

What encoding loses has mean 0 (int8, by stochastic rounding), or it is kept
and added to what is encoded next (error feedback, arXiv:1901.09847): on both
ways, so that over the steps nothing is lost (arXiv:1905.05957, algorithm 1).
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from sharding import collectives

Message = tuple[jax.Array, ...]


class Format(Protocol):
  """How blocks of float32 are written in few bytes.

  Attributes:
    block: numbers a block.
  """

  block: int

  def encode(self, x: jax.Array, key: jax.Array) -> Message:
    """float32 [..., block] -> arrays [..., anything]; `key` is for rounding."""

  def decode(self, message: Message) -> jax.Array:
    """The inverse, but for what is lost: float32 [..., block]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8:
  """Whole multiples of 1/127 of a block's largest; right in expectation.

  Rounds up with the probability of the fraction (QSGD, arXiv:1610.02132,
  section 3.1). 1 + 4 / block bytes a number: 0.254 of float32's.

  Attributes:
    block: numbers that share a scale.
  """

  block: int = 256

  def encode(self, x: jax.Array, key: jax.Array) -> Message:
    """int8 [..., block] and float32 [..., 1]."""
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    steps = x / jnp.where(scale > 0, scale, 1)
    noise = jax.random.uniform(key, x.shape)
    # The division may round the largest up to a little more than 127.
    rounded = jnp.clip(jnp.floor(steps + noise), -127, 127)
    return rounded.astype(jnp.int8), scale

  def decode(self, message: Message) -> jax.Array:
    """float32 [..., block]."""
    steps, scale = message
    return steps.astype(jnp.float32) * scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signs:
  """One bit a number, and the mean of their sizes.

  As in 1-bit Adam (arXiv:2102.02888, section 5). 1/8 + 4 / block bytes a
  number: 0.032 of float32's. Needs error feedback.

  Attributes:
    block: numbers that share a size; a multiple of 8.
  """

  block: int = 1024

  def encode(self, x: jax.Array, key: jax.Array) -> Message:
    """uint8 [..., block / 8] and float32 [..., 1]."""
    del key
    size = jnp.mean(jnp.abs(x), axis=-1, keepdims=True)
    return jnp.packbits(x >= 0, axis=-1), size

  def decode(self, message: Message) -> jax.Array:
    """float32 [..., block]."""
    bits, size = message
    signs = jnp.unpackbits(bits, axis=-1).astype(jnp.float32)
    return (2 * signs - 1) * size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
  """The entries of a block that are largest in size.

  Top-k sparsification (arXiv:1704.05021), by block, so that a place is two
  bytes. 6 keep / block bytes a number: 0.012 of float32's. Needs error
  feedback.

  Attributes:
    block: numbers a block, at most 65,536.
    keep: how many of them are sent.
  """

  block: int = 1024
  keep: int = 8

  def encode(self, x: jax.Array, key: jax.Array) -> Message:
    """float32 and uint16 [..., keep]: entries, and their places."""
    del key
    _, place = jax.lax.top_k(jnp.abs(x), self.keep)
    entries = jnp.take_along_axis(x, place, axis=-1)
    return entries, place.astype(jnp.uint16)

  def decode(self, message: Message) -> jax.Array:
    """float32 [..., block]."""
    entries, place = message
    empty = jnp.zeros((*entries.shape[:-1], self.block), jnp.float32)
    return jnp.put_along_axis(
      empty, place.astype(jnp.int32), entries, axis=-1, inplace=False
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
  """What a device has lost in encoding, and owes to the sum.

  Attributes:
    sent: float32 [N, blocks, block], of its own vectors.
    summed: float32 [blocks, block], of its part of the sums.
  """

  sent: jax.Array
  summed: jax.Array


def no_residual(size: int, num_devices: int, form: Format) -> Residual:
  """Returns what is owed before the first sum: nothing.

  Args:
    size: of the vectors.
    num_devices: N.
    form: the format.
  """
  num_blocks = -(-size // (num_devices * form.block))
  summed = jnp.zeros((num_blocks, form.block), jnp.float32)
  return Residual(
    sent=jnp.zeros((num_devices, *summed.shape), jnp.float32), summed=summed
  )


def all_reduce(
  x: jax.Array,
  axis: str | tuple[str, ...],
  form: Format,
  *,
  key: jax.Array,
  residual: Residual | None = None,
) -> tuple[jax.Array, Residual | None]:
  """Sums vectors over mesh axes, of which all devices get the same bits.

  Args:
    x: float32 [size], another on each device.
    axis: mesh axes, manual where this is called.
    form: what crosses the wire.
    key: of rounding, another on each device.
    residual: of the last sum; None: what is lost is lost.

  Returns:
    (sum, residual): float32 [size], and what is owed now (None for None).
  """
  num_devices = jax.lax.axis_size(axis)
  owed = residual or no_residual(x.size, num_devices, form)
  padded = jnp.pad(x, (0, owed.sent.size - x.size))
  own_key, sum_key = jax.random.split(key)

  parts = padded.reshape(owed.sent.shape) + owed.sent
  message = form.encode(parts, own_key)
  lost = parts - form.decode(message)
  message = tuple(
    collectives.all_to_all(array, axis, split_dim=0, join_dim=0)
    for array in message
  )

  part = jnp.sum(form.decode(message), axis=0) + owed.summed
  message = form.encode(part, sum_key)
  lost_of_sum = part - form.decode(message)
  message = tuple(
    collectives.all_gather(array[None], axis, dim=0) for array in message
  )
  total = form.decode(message).ravel()[: x.size]
  if residual is None:
    return total, None
  return total, Residual(sent=lost, summed=lost_of_sum)
