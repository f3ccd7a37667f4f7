"""Host arrays to global arrays: each process brings its own rows.

Rows are split over the batch axes; the rest of a batch is whole on every
device (it is a few integers a token), until the first constraint of the model
splits the sequence.
"""

import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding.axes import Rules
from sharding.rules import mesh_axes, spec


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
  """Returns the placement of every array of a batch: rows split, rest whole."""
  return NamedSharding(mesh, spec(("batch",), rules, array="batch"))


def check_batch_size(
  global_batch_size: int,
  mesh: Mesh,
  rules: Rules,
  *,
  accumulation: int = 1,
  rows_per_example: int = 1,
) -> None:
  """Refuses a batch that the mesh and the micro-batches do not divide.

  Args:
    global_batch_size: rows of all processes together.
    mesh: its batch axes split the rows.
    rules: `rules.batch` names these axes.
    accumulation: micro-batches a step.
    rows_per_example: neighbouring rows that a loss reads together (2 for
      preference pairs); each device's share of a micro-batch holds whole
      examples.

  Raises:
    ValueError: the rows do not divide.
  """
  factors = {
    f"mesh.{axis}": mesh.shape[axis] for axis in mesh_axes("batch", rules)
  }
  factors |= {
    "accumulation": accumulation,
    "rows per example": rows_per_example,
  }
  unit = math.prod(factors.values())
  if global_batch_size < 1 or global_batch_size % unit:
    why = " x ".join(f"{name}={n}" for name, n in factors.items() if n > 1)
    raise ValueError(
      f"global_batch_size={global_batch_size} must be a positive multiple of"
      f" {unit} ({why or 'one row'}), so that every device takes equally many"
      " rows of every micro-batch"
    )


def process_rows(global_batch_size: int, mesh: Mesh, rules: Rules) -> slice:
  """Returns the rows of the global batch that this process reads.

  Processes that share a part of the batch (tensor parallelism across hosts)
  read the same rows.

  Raises:
    ValueError: the batch does not divide over the mesh.
  """
  check_batch_size(global_batch_size, mesh, rules)
  num_parts, mine = _parts(mesh, rules)
  rows = global_batch_size // num_parts
  return slice(mine[0] * rows, (mine[-1] + 1) * rows)


def to_global(
  batch: Mapping[str, np.ndarray], mesh: Mesh, rules: Rules
) -> dict[str, jax.Array]:
  """Puts this process's rows of a batch on its devices.

  Args:
    batch: arrays of the rows that `process_rows` names.
    mesh: from `sharding.mesh.make_mesh`.
    rules: `rules.batch` names the axes that split rows.

  Returns:
    The same fields as global arrays [B, ...].

  Raises:
    ValueError: the fields differ in rows, or the rows do not divide over the
      mesh.
  """
  rows = {name: len(array) for name, array in batch.items()}
  local_rows = min(rows.values())
  if set(rows.values()) != {local_rows}:
    raise ValueError(f"the fields of a batch must have equal rows; got {rows}")
  num_parts, mine = _parts(mesh, rules)
  global_rows = local_rows * num_parts // len(mine)
  check_batch_size(global_rows, mesh, rules)
  placement = batch_sharding(mesh, rules)
  if jax.process_count() == 1:
    # Nothing to put together: one call places all fields.
    return jax.device_put(dict(batch), placement)
  return {
    name: jax.make_array_from_process_local_data(
      placement, np.asarray(array), (global_rows, *array.shape[1:])
    )
    for name, array in batch.items()
  }


def _parts(mesh: Mesh, rules: Rules) -> tuple[int, list[int]]:
  """Returns the number of parts of a batch and this process's, in order."""
  num_parts = math.prod(mesh.shape[axis] for axis in mesh_axes("batch", rules))
  placed = batch_sharding(mesh, rules).addressable_devices_indices_map(
    (num_parts,)
  )
  mine = sorted({rows.indices(num_parts)[0] for (rows,) in placed.values()})
  assert mine == list(range(mine[0], mine[-1] + 1)), (
    f"this process's parts of the batch are not neighbours: {mine}"
  )
  return num_parts, mine
