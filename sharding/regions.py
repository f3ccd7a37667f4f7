"""Code written for one device, inside programs that XLA partitions.

A mesh has Auto axes: XLA splits what it is given. Kernels and rings are
written by hand, in regions that are manual over mesh axes; a pipeline stage is
such a region over one axis, in which others may stand.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


def current_mesh(mesh: Mesh) -> Mesh | AbstractMesh:
  """Returns the mesh to name here: inside a region JAX wants its own view."""
  inside = jax.sharding.get_abstract_mesh()
  return inside if inside.manual_axes else mesh


def manual_axes() -> tuple[str, ...]:
  """Returns the mesh axes over which this code is already one device's."""
  return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def by_device(
  function: Callable, mesh: Mesh, *, in_specs: Any, out_specs: Any
) -> Callable:
  """Returns `function` as a region, manual over all axes that are still Auto.

  Args:
    function: of one device's parts.
    mesh: the whole mesh.
    in_specs: of the arguments, as in `jax.shard_map`.
    out_specs: of the results.
  """
  rest = set(mesh.axis_names) - set(manual_axes())
  here = current_mesh(mesh)
  region = jax.shard_map(
    function,
    mesh=here,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names=rest,
    # Kernels do not say over which axes their results vary.
    check_vma=False,
  )

  def placed(spec, part):
    place = NamedSharding(here, spec)
    constrain = lambda x: jax.lax.with_sharding_constraint(x, place)
    return jax.tree.map(constrain, part)

  def run(*arguments):
    # Weights whose gradients are added up in place (`vjp.with_refs`) must not
    # enter a region as they are: JAX refuses it.
    is_spec = lambda spec: isinstance(spec, PartitionSpec)
    return region(*jax.tree.map(placed, in_specs, arguments, is_leaf=is_spec))

  return run


def gathered(
  part: jax.Array, axes: tuple[str, ...], dim: int, dtype: str
) -> jax.Array:
  """A float32 weight made whole, inside of a region.

  It travels in the dtype in which it will be multiplied, and its gradient back
  in float32, to the device that has the part.

  Args:
    part: float32, this device's.
    axes: the mesh axes that split it.
    dim: which of its dims they split.
    dtype: in which it travels.
  """
  if not axes:
    return part

  @jax.custom_vjp
  def gather(part):
    whole = jax.lax.all_gather(part.astype(dtype), axes, axis=dim, tiled=True)
    return whole.astype(part.dtype)

  def scatter(_, gradient):
    return (
      jax.lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True),
    )

  gather.defvjp(lambda part: (gather(part), None), scatter)
  return gather(part)
