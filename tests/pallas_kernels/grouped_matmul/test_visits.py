"""Orders of visits, written out and counted."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.visits import every_group, every_tile

SIZES = np.array([3, 0, 6, 1], np.int32)  # and 5 rows of no group


def listed(visits):
  pairs = zip(visits.groups.tolist(), visits.tiles.tolist())
  return list(pairs)[: int(visits.count)]


def test_tiles_that_groups_share_are_visited_once_for_each():
  visits = every_tile(SIZES, 15, 4)
  assert visits.bounds.tolist() == [0, 3, 3, 9, 10, 15]
  assert listed(visits) == [
    (0, 0), (2, 0), (2, 1), (2, 2), (3, 2), (4, 2), (4, 3)
  ]  # fmt: skip


def test_empty_groups_are_visited_once_and_rows_of_no_group_not():
  assert listed(every_group(SIZES, 15, 4)) == [
    (0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (3, 2)
  ]  # fmt: skip


@pytest.mark.parametrize("visit", [every_tile, every_group])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=30)
def test_rows_of_each_group_are_met_once_and_in_order(visit, data):
  M, rows, E = data.draw(
    st.sampled_from([(40, 4, 9), (37, 8, 3), (5, 64, 2), (1, 1, 1)])
  )
  edges = data.draw(st.lists(st.integers(0, M), min_size=E, max_size=E))
  visits = jax.jit(visit, static_argnums=(1, 2))(
    np.diff([0, *sorted(edges)]).astype(np.int32), M, rows
  )
  pairs = listed(visits)
  assert int(visits.count) <= len(visits.groups)
  assert pairs == sorted(set(pairs))
  assert all(0 <= tile * rows < M for _, tile in pairs)
  bounds = visits.bounds.tolist()
  met = [
    (group, row)
    for group, tile in pairs
    for row in range(tile * rows, min(tile * rows + rows, M))
    if bounds[group] <= row < bounds[group + 1]
  ]
  groups = E + (visit is every_tile)
  wanted = [(e, r) for e in range(groups) for r in range(*bounds[e : e + 2])]
  assert met == wanted
  if visit is every_group:
    assert {group for group, _ in pairs} == set(range(E))
