"""A vocabulary that is split over a mesh axis, inside a `shard_map`.

Each device has the logits of its own tokens of the vocabulary. What the op
gives is a sum over the axis of one share a device; no share depends on what
the others hold except through `total_lse`. The gradient of a sum of shares is
the sum of each device's own, so that a device needs no other's dx either:
whoever takes the cotangent of a replicated x adds up (`shard_map` does).

With `axis` None there is one share, the whole.
"""

import jax
import jax.numpy as jnp

Axis = str | tuple[str, ...] | None


def first_id(num_own: int, axis: Axis) -> jax.Array | int:
  """The id of the first of this device's `num_own` tokens."""
  return 0 if axis is None else jax.lax.axis_index(axis) * num_own


def total_lse(lse: jax.Array, axis: Axis) -> jax.Array:
  """The logsumexp over all devices from that over each one's own logits."""
  if axis is None:
    return lse
  top = jax.lax.pmax(lse, axis)
  return top + jnp.log(jax.lax.psum(jnp.exp(lse - top), axis))


def once(x: jax.Array, axis: Axis) -> jax.Array:
  """The share of a value that all devices hold: one brings it."""
  if axis is None:
    return x
  return jnp.where(jax.lax.axis_index(axis) == 0, x, 0.0)


def total(share: jax.Array, axis: Axis) -> jax.Array:
  """The sum of all shares, on every device."""
  return share if axis is None else jax.lax.psum(share, axis)


def best(values, ids, k: int, axis: Axis) -> tuple[jax.Array, jax.Array]:
  """The `k` largest values [..., k] of all devices, and their ids."""
  if axis is None:
    return values, ids
  gather = lambda x: jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
  values, at = jax.lax.top_k(gather(values), k)
  return values, jnp.take_along_axis(gather(ids), at, axis=-1)
