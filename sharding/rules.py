"""From logical dims to placements, with errors that name what does not fit.

A weight or an activation names its dims ("embed", "heads", ...); `Rules` maps
each name to mesh axes; the two give a `PartitionSpec`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.axes import MESH_AXES, Rules
from sharding.regions import current_mesh, manual_axes

Tree = TypeVar("Tree")


def mesh_axes(name: str | None, rules: Rules) -> tuple[str, ...]:
  """Returns the mesh axes that split a logical dim; () for None.

  Raises:
    ValueError: the rules have no such dim, or name an unknown mesh axis.
  """
  if name is None:
    return ()
  known = [field.name for field in dataclasses.fields(rules)]
  if name not in known:
    raise ValueError(f"unknown logical dim {name!r}; rules has {known}")
  axes = getattr(rules, name)
  for axis in axes:
    if axis not in MESH_AXES:
      raise ValueError(
        f"rules.{name}={axes} names the unknown mesh axis {axis!r};"
        f" mesh axes are {MESH_AXES}"
      )
  return axes


def spec(
  names: Sequence[str | None], rules: Rules, *, array: str = "array"
) -> PartitionSpec:
  """Translates the logical names of an array's dims.

  Args:
    names: one logical dim, or None (whole), for each dim of the array.
    rules: logical dim -> mesh axes.
    array: what to call the array in an error.

  Raises:
    ValueError: two dims land on one mesh axis, or see `mesh_axes`.
  """
  entries = [mesh_axes(name, rules) for name in names]
  owner = {}
  for dim, (name, axes) in enumerate(zip(names, entries, strict=True)):
    for axis in axes:
      if axis in owner:
        other = owner[axis]
        raise ValueError(
          f"{array}{tuple(names)}: dim {other} ({names[other]!r} ->"
          f" {entries[other]}) and dim {dim} ({name!r} -> {axes}) are both"
          f" split over mesh axis {axis!r}; change rules.{names[other]} or"
          f" rules.{name}"
        )
      owner[axis] = dim
  # A tuple of one and its element mean the same; the element prints better.
  return PartitionSpec(
    *(axes[0] if len(axes) == 1 else axes or None for axes in entries)
  )


def sharding(
  array: str,
  shape: Sequence[int],
  names: Sequence[str | None],
  mesh: Mesh,
  rules: Rules,
) -> NamedSharding:
  """Places an array of a known shape, refusing what would need padding.

  Args:
    array: what to call the array in an error.
    shape: its global shape.
    names: the logical name, or None, of each dim.
    mesh: from `sharding.mesh.make_mesh`.
    rules: logical dim -> mesh axes.

  Raises:
    ValueError: a dim is not divisible by the devices that split it, or see
      `spec`.
  """
  assert len(shape) == len(names), (array, shape, names)
  partition = spec(names, rules, array=array)
  for dim, (size, name) in enumerate(zip(shape, names, strict=True)):
    axes = mesh_axes(name, rules)
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if size % parts:
      used = [axis for axis in axes if mesh.shape[axis] > 1]
      split = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in used)
      raise ValueError(
        f"{array}{tuple(names)} of shape {tuple(shape)}: dim {dim} ({name!r},"
        f" size {size}) does not divide by mesh {split} ({parts} parts)."
        f" Change the size, the mesh, or rules.{name} (() keeps the dim whole)"
      )
  return NamedSharding(mesh, partition)


def constrain(
  x: jax.Array, names: Sequence[str | None], mesh: Mesh, rules: Rules
) -> jax.Array:
  """Pins the placement of an activation inside a jitted function.

  Inside a region that is manual over some axes, the others are pinned.

  Raises:
    ValueError: see `sharding`.
  """
  manual = manual_axes()
  if manual:
    rules = without_axes(rules, manual)
  placed = sharding("activation", x.shape, names, mesh, rules)
  if manual:
    placed = NamedSharding(current_mesh(mesh), placed.spec)
  return jax.lax.with_sharding_constraint(x, placed)


def without_axes(rules: Rules, axes: Sequence[str]) -> Rules:
  """Returns rules by which these mesh axes split nothing."""
  kept = {
    field.name: tuple(
      axis for axis in getattr(rules, field.name) if axis not in axes
    )
    for field in dataclasses.fields(rules)
  }
  return Rules(**kept)


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the placement of what every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())


def is_variable(leaf: object) -> bool:
  """Whether a tree node is a weight with metadata (also its moments)."""
  return isinstance(leaf, nnx.Variable)


def stacked(tree: Any) -> list[bool]:
  """Returns which leaves have the dim of stacked layers in front."""
  return [
    is_variable(leaf) and leaf.ndim > len(leaf.get_metadata("names"))
    for leaf in jax.tree.leaves(tree, is_leaf=is_variable)
  ]


def tree_shardings(tree: Tree, mesh: Mesh, rules: Rules) -> Tree:
  """Returns the tree with each array replaced by its sharding.

  Args:
    tree: abstract or real arrays. An `nnx.Variable` has metadata `names`, the
      logical names of its last dims; a dim more in front is the stacked
      layers. Layers that do not divide are left whole, and another dim is
      split in their place. Any other leaf (step, counts, keys) is replicated.
    mesh: where to.
    rules: logical dim -> mesh axes.

  Raises:
    ValueError: see `sharding`; the array is named by its path.
  """

  def place(path, leaf):
    if not is_variable(leaf):
      return replicated(mesh)
    names = tuple(leaf.get_metadata("names"))
    array = jax.tree_util.keystr(path, simple=True, separator=".")
    if leaf.ndim == len(names):
      return leaf.replace(sharding(array, leaf.shape, names, mesh, rules))
    axes = mesh_axes("layers", rules)
    if leaf.shape[0] % math.prod(mesh.shape[axis] for axis in axes) == 0:
      names = ("layers", *names)
      return leaf.replace(sharding(array, leaf.shape, names, mesh, rules))
    placed = sharding(array, leaf.shape, (None, *names), mesh, rules)
    return leaf.replace(_split_more(leaf.shape, placed, axes))

  return jax.tree_util.tree_map_with_path(place, tree, is_leaf=is_variable)


def _split_more(
  shape: Sequence[int], placed: NamedSharding, axes: tuple[str, ...]
) -> NamedSharding:
  """Splits one more dim than the first over `axes`, or splits one further.

  Whoever holds all layers would otherwise hold them whole; small arrays that
  nothing divides are.
  """
  mesh = placed.mesh
  for dim in range(1, len(shape)):
    entry = placed.spec[dim]
    entry = (entry,) if isinstance(entry, str) else tuple(entry or ())
    entry += tuple(axis for axis in axes if mesh.shape[axis] > 1)
    if shape[dim] % math.prod(mesh.shape[axis] for axis in entry) == 0:
      spec = list(placed.spec)
      spec[dim] = entry
      return NamedSharding(mesh, PartitionSpec(*spec))
  return placed
