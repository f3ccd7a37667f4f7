"""Splits against all splits there are; the two orders undo each other."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.stages import Ends, Layout, split_layers, stage_costs

COST = st.floats(0.5, 3.0)


ENDS = st.builds(Ends, first=COST, last=COST, last_layer=st.floats(0.5, 1.0))


@given(st.lists(COST, min_size=1, max_size=9), st.integers(1, 4), ENDS)
def test_splits_are_within_five_percent_of_the_best(costs, parts, ends):
  parts = min(parts, len(costs))
  found = split_layers(costs, parts, ends)

  def slowest(counts):
    layout = Layout(num_stages=parts, num_chunks=1, counts=counts)
    return stage_costs(layout, costs, ends).max()

  splits = [
    counts
    for counts in itertools.product(range(1, len(costs) + 1), repeat=parts)
    if sum(counts) == len(costs)
  ]
  best = min(map(slowest, splits))
  assert found in splits
  assert slowest(found) <= 1.05 * best + 1e-6
  # Nothing as fast has fewer places.
  fewer = [s for s in splits if max(s) < max(found)]
  assert all(slowest(s) > 1.05 * best - 1e-6 for s in fewer)


def test_a_heavy_head_has_fewer_layers_beside_it():
  assert split_layers([1.0] * 30, 4, Ends(last=2.0)) == (8, 8, 8, 6)
  # It does not weigh where layers go through one pass of four less.
  ends = Ends(last=2.4 * 3 / 4, last_layer=3 / 4)
  assert split_layers([1.0] * 32, 4, ends) == (8, 8, 8, 8)
  assert split_layers([1.0] * 32, 8) == (4,) * 8
  with pytest.raises(ValueError, match="mesh.pipeline x step.virtual_stages"):
    split_layers([1.0] * 3, 4)


def test_stages_cost_their_layers_and_their_end():
  layout = Layout(num_stages=2, num_chunks=2, counts=(1, 2, 1, 1))
  found = stage_costs(
    layout, [1, 2, 3, 4, 6], Ends(first=10, last=20, last_layer=0.5)
  )
  np.testing.assert_array_equal(found, [11, 5, 4, 23])


def test_order_of_a_small_layout():
  layout = Layout(num_stages=2, num_chunks=2, counts=(2, 2, 2, 1))
  # Stage 0 holds the first and the third quarter, stage 1 the others.
  assert layout.order.tolist() == [0, 1, 4, 5, 2, 3, 6, -1]
  assert layout.numbers.tolist() == [[0, 1], [2, 3], [4, 5], [6, -1]]
  assert layout.places.tolist() == [0, 1, 4, 5, 2, 3, 6]
  assert not layout.is_even and not layout.is_natural


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_places_undo_the_order(P, V, data):
  counts = tuple(data.draw(st.integers(1, 4)) for _ in range(P * V))
  layout = Layout(num_stages=P, num_chunks=V, counts=counts)
  layers = np.arange(layout.num_layers)
  np.testing.assert_array_equal(layout.order[layout.places], layers)
  assert (layout.order >= 0).sum() == layout.num_layers
  assert len(layout.order) == P * V * layout.depth
  if V == 1 and layout.is_even:
    assert layout.is_natural
