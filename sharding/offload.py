"""Arrays that stand in host memory and come to the device a layer at a time.

A TPU's compiler keeps them there; a CPU accepts the same program and has one
memory for all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import compute_on
from jax.sharding import NamedSharding, PartitionSpec

PLATFORMS = ("tpu", "gpu", "cpu")


def check_platform(platform: str) -> None:
  """Refuses devices that cannot read the memory of their host.

  Raises:
    ValueError: the platform has no such memory.
  """
  if platform not in PLATFORMS:
    raise ValueError(
      f"step.offload keeps arrays in pinned host memory, which {PLATFORMS}"
      f" have and {platform!r} has not; leave step.offload as it is"
    )


def on_host(place: NamedSharding) -> NamedSharding:
  """Returns the same split, in the memory of the devices' hosts."""
  return place.with_memory_kind("pinned_host")


def to_host(tree: Any) -> Any:
  """Moves arrays, inside a jitted function."""
  return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: Any) -> Any:
  """Moves arrays, inside a jitted function."""
  return jax.device_put(tree, jax.memory.Space.Device)


def computed_on_host(function: Callable) -> Callable:
  """Returns the function, run by the cores of the host on arrays there."""
  place: Any = compute_on.compute_on  # Of either signature.
  if jax.__version_info__ < (0, 11):
    return place("device_host")(jax.jit(function))
  host = jax.memory.Space.Host
  return place(function, compute_type="device_host", out_memory_spaces=host)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streamed:
  """A weight of stacked layers that comes to the device when a layer runs.

  Attributes:
    weight: [L, ...], in either memory; of one layer, inside of a scan.
    total: what its gradient is added to, in host memory; None: evaluation.
      The cotangent of `total` is the new total.
  """

  weight: jax.Array
  total: jax.Array | None = None


def entered(layer: Any) -> Any:
  """Returns a layer with its `Streamed` weights on the device, as arrays."""
  is_streamed = lambda leaf: isinstance(leaf, Streamed)

  def enter(leaf):
    if not is_streamed(leaf):
      return leaf
    if leaf.total is None:
      return to_device(leaf.weight)
    return _tapped(leaf.weight, leaf.total)

  return jax.tree.map(enter, layer, is_leaf=is_streamed)


@jax.custom_vjp
def _tapped(weight: jax.Array, total: jax.Array) -> jax.Array:
  """The weight; behind it, its gradient joins the total."""
  del total
  return to_device(weight)


def _tapped_bwd(total: jax.Array, gradient: jax.Array):
  return None, to_host(to_device(total) + gradient)


_tapped.defvjp(
  lambda weight, total: (_tapped(weight, total), total), _tapped_bwd
)


def zeros(shape: tuple[int, ...], dtype: Any, place: NamedSharding):
  """Returns zeros in host memory, inside a jitted function.

  Layer by layer, so that the device never holds them all.

  Args:
    shape: [L, ...].
    dtype: of the zeros.
    place: how they are split.
  """
  of_layer = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))

  def layer(carry, _):
    value = jnp.zeros(shape[1:], dtype)
    return carry, to_host(jax.lax.with_sharding_constraint(value, of_layer))

  return jax.lax.scan(layer, None, length=shape[0])[1]
