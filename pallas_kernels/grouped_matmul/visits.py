"""Which tile of rows meets which group: the order of a kernel's grid.

A kernel walks tiles of rows in order. A tile that several groups share is
visited once for each of them, so that the number of visits is the number of
tiles and of borders inside tiles. All of it is computed from the group sizes
by plain XLA, and prefetched as scalars.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
  """All int32.

  Attributes:
    bounds: rows of group e are bounds[e] to bounds[e + 1]; group E are the
      rows of no group. [E + 2].
    groups: group of each visit, [at most tiles + E].
    tiles: tile of rows of each visit.
    count: visits, a scalar; what lies behind in the arrays has no meaning.
  """

  bounds: jax.Array
  groups: jax.Array
  tiles: jax.Array
  count: jax.Array


def every_tile(group_sizes_E: jax.Array, M: int, rows: int) -> Visits:
  """Visits in which every row is met once, those of no group included.

  Args:
    group_sizes_E: int32.
    M: number of rows.
    rows: of a tile.
  """
  bounds = _bounds(group_sizes_E, M)
  return _visits(bounds, bounds[:-1], bounds[1:], M, rows)


def every_group(group_sizes_E: jax.Array, M: int, rows: int) -> Visits:
  """Visits in which every group is met, empty ones once, but not group E.

  Args:
    group_sizes_E: int32.
    M: number of rows.
    rows: of a tile.
  """
  bounds = _bounds(group_sizes_E, M)
  # An empty group is met in the tile that its first row would be in.
  starts = jnp.minimum(bounds[:-2], M - 1)
  return _visits(bounds, starts, jnp.maximum(bounds[1:-1], starts + 1), M, rows)


def _bounds(group_sizes_E, M: int):
  ends = jnp.minimum(jnp.cumsum(group_sizes_E), M)
  edges = jnp.array([0]), ends, jnp.array([M])
  return jnp.concatenate(edges).astype(jnp.int32)


def _visits(bounds, starts, ends, M: int, rows: int) -> Visits:
  """Visits of groups that hold the rows `starts` to `ends`."""
  first = starts // rows
  visits = jnp.where(ends > starts, (ends - 1) // rows - first + 1, 0)
  behind = jnp.cumsum(visits)
  at = jnp.arange(-(-M // rows) + len(starts) - 1, dtype=jnp.int32)
  group = jnp.sum(behind[None, :] <= at[:, None], axis=1, dtype=jnp.int32)
  group = jnp.minimum(group, len(starts) - 1)
  tile = first[group] + at - (behind - visits)[group]
  count = behind[-1].astype(jnp.int32)
  return Visits(bounds, group, tile.astype(jnp.int32), count)
