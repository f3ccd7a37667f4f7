"""Which layers stand on which stage of a pipeline. Knows no JAX."""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

# What a split may be slower than the best one, to need fewer places.
_SLACK = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """The order of layers in arrays that are split over the stages.

  Stage s holds `num_chunks` chunks of layers; chunk c is the virtual stage
  c P + s. All chunks have places for as many layers as the largest has; places
  without a layer come last in a chunk.

  Attributes:
    num_stages: P.
    num_chunks: V, chunks a stage.
    counts: layers of each of the P V virtual stages, in the order of the model.
  """

  num_stages: int
  num_chunks: int
  counts: tuple[int, ...]

  @property
  def num_layers(self) -> int:
    """Of the model."""
    return sum(self.counts)

  @property
  def depth(self) -> int:
    """Places of a chunk."""
    return max(self.counts)

  @property
  def is_even(self) -> bool:
    """Whether every place has a layer."""
    return min(self.counts) == self.depth

  @property
  def numbers(self) -> np.ndarray:
    """The layers of each virtual stage, int32 [P V, depth]; -1: none."""
    counts = np.array(self.counts)[:, None]
    first = np.cumsum(counts, axis=0) - counts
    place = np.arange(self.depth)[None]
    return np.where(place < counts, first + place, -1).astype(np.int32)

  @property
  def order(self) -> np.ndarray:
    """The layer in each place of a split array, int32 [P V depth]; -1: none."""
    by_chunk = self.numbers.reshape(self.num_chunks, self.num_stages, -1)
    return by_chunk.swapaxes(0, 1).reshape(-1)

  @property
  def places(self) -> np.ndarray:
    """Where each layer of the model stands, int64 [L]: undoes `order`."""
    where = np.flatnonzero(self.order >= 0)
    return where[np.argsort(self.order[where])]

  @property
  def is_natural(self) -> bool:
    """Whether arrays are as the model has them."""
    return np.array_equal(self.order, np.arange(self.num_layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ends:
  """What the first and the last part have beside their layers, or have not.

  Attributes:
    first: cost of what stands before the layers.
    last: cost of what stands behind them.
    last_layer: what a layer costs on the last part, over its cost elsewhere.
  """

  first: float = 0.0
  last: float = 0.0
  last_layer: float = 1.0


def split_layers(
  costs: Sequence[float], num_parts: int, ends: Ends = Ends()
) -> tuple[int, ...]:
  """Gives neighbouring layers to parts so that the slowest part is fast.

  All parts have places for as many layers as the largest has, and places cost
  memory: it takes the fewest with which the slowest part is within 5 % of the
  best.

  Args:
    costs: of each layer.
    num_parts: how many; each gets one layer at least.
    ends: what makes the first and the last part different.

  Returns:
    Layers of each part.

  Raises:
    ValueError: there are fewer layers than parts.
  """
  L = len(costs)
  if num_parts > L:
    raise ValueError(
      f"{L} layers cannot stand on {num_parts} virtual stages: wanted"
      " mesh.pipeline x step.virtual_stages to be at most model.num_layers"
    )
  until = np.concatenate([[0.0], np.cumsum(costs)])
  sums = np.unique(until[None] - until[:, None])
  # Whatever the best split is, its slowest part costs one of these.
  on_last = ends.last_layer * sums + ends.last
  limits = np.unique([sums, sums + ends.first, on_last, on_last + ends.first])

  def split(limit: float, depth: int) -> tuple[int, ...] | None:
    """Fills parts up to a cost and a number of layers; None: L is too much."""
    counts, start = [], 0
    for part in range(num_parts):
      room = limit * (1 + 1e-9)
      if part == 0:
        room -= ends.first
      if part == num_parts - 1:
        room = (room - ends.last) / ends.last_layer
      end = until[start] + room
      fits = int(np.searchsorted(until, end, side="right")) - 1
      n = min(fits - start, depth, L - start - (num_parts - 1 - part))
      if n < 1:
        return None
      counts.append(n)
      start += n
    return tuple(counts) if start == L else None

  found = []
  for depth in range(-(-L // num_parts), L - num_parts + 2):
    fits = lambda limit, depth=depth: split(limit, depth) is not None
    limit = limits[bisect.bisect_left(limits, True, key=fits)]
    found.append((limit, split(limit, depth)))
  least = min(limit for limit, _ in found)
  return next(s for limit, s in found if limit <= (1 + _SLACK) * least)


def stage_costs(
  layout: Layout, costs: Sequence[float], ends: Ends = Ends()
) -> np.ndarray:
  """Cost of each virtual stage, float64 [P V]; arguments: `split_layers`."""
  until = np.cumsum(layout.counts)
  parts = np.array([x.sum() for x in np.split(np.array(costs), until[:-1])])
  parts[-1] = ends.last_layer * parts[-1] + ends.last
  parts[0] += ends.first
  return parts
