"""Pipeline schedules as tables: who works on which micro-batch in which tick.

P stages hold V chunks of layers each. Chunk c of stage s is the virtual stage
c P + s, so that a micro-batch visits the stages round after round. In a tick a
stage takes its actions in order: forward, backward, weight gradient. What it
sends in one tick arrives at the start of the next. Since all stages meet in
the permutation that carries it, a tick lasts as long as its slowest stage.

This file knows no JAX; `sharding/pipeline.py` runs a table.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

# The actions of a tick, in order, and what a table says of each.
FORWARD, BACKWARD, WEIGHT = range(3)
MICRO, CHUNK = range(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """One step of a pipeline.

  Attributes:
    name: how it is called.
    num_micro: micro-batches M of a step.
    num_chunks: chunks of layers V that each stage holds.
    table: int32 [ticks, P, 3, 2]: micro-batch and chunk of the forward, the
      backward and the weight-gradient action of a stage in a tick; -1: none.
    actions: those there are, in order. Without `WEIGHT`, backward means all
      gradients; without `BACKWARD`, the pipeline evaluates.
  """

  name: str
  num_micro: int
  num_chunks: int
  table: np.ndarray
  actions: tuple[int, ...] = (FORWARD, BACKWARD)

  @property
  def split(self) -> bool:
    """Whether gradients of weights are an action of their own."""
    return WEIGHT in self.actions

  @property
  def num_stages(self) -> int:
    """P, devices along the pipeline."""
    return self.table.shape[1]

  @property
  def num_ticks(self) -> int:
    """Rounds of exchange."""
    return len(self.table)

  @property
  def num_virtual(self) -> int:
    """Virtual stages, P V."""
    return self.num_stages * self.num_chunks


def gpipe(num_stages: int, num_micro: int) -> Schedule:
  """All forward, then all backward (arXiv:1811.06965)."""
  P, M = num_stages, num_micro
  table = _empty(2 * (M + P - 1), P)
  for s in range(P):
    for m in range(M):
      table[m + s, s, FORWARD] = m, 0
      table[M + P - 1 + m + P - 1 - s, s, BACKWARD] = m, 0
  return Schedule(name="gpipe", num_micro=M, num_chunks=1, table=table)


def one_forward_one_backward(num_stages: int, num_micro: int) -> Schedule:
  """1F1B (arXiv:2006.09503) with both actions in one tick.

  With one action a tick a stage goes forward while its neighbour goes
  backward, and both wait for the slower. With two, every tick of the steady
  state costs the same on all stages, at 2 P - 1 micro-batches in flight in
  place of P.
  """
  schedule = interleaved(num_stages, num_micro, 1)
  return dataclasses.replace(schedule, name="1f1b")


def interleaved(num_stages: int, num_micro: int, num_chunks: int) -> Schedule:
  """1F1B over V chunks of layers a stage (arXiv:2104.04473, section 2.2).

  Micro-batches pass in groups of P: a group goes through all chunks before the
  next one starts. Stage s takes its k-th forward action in tick k + s; a
  group's return to the first stage then falls into the very tick that is free.

  Raises:
    ValueError: V > 1 and the micro-batches do not fill their last group.
  """
  P, M, V = num_stages, num_micro, num_chunks
  if V > 1 and M % P:
    raise ValueError(
      f"the interleaved schedule sends micro-batches in groups of {P}, one a"
      f" stage: wanted step.accumulation to be a multiple of mesh.pipeline={P},"
      f" got {M}"
    )
  table = _empty(M * V + P * V + P - 2, P)
  order = [
    (m, c)
    for first in range(0, M, P)
    for c in range(V)
    for m in range(first, min(first + P, M))
  ]
  for s in range(P):
    for k, (m, c) in enumerate(order):
      table[k + s, s, FORWARD] = m, c
      # The last virtual stage turns round in the tick of its first forward.
      table[V * P - 1 + k + P - 1 - s, s, BACKWARD] = m, V - 1 - c
  return Schedule(name="interleaved", num_micro=M, num_chunks=V, table=table)


def zero_bubble(num_stages: int, num_micro: int) -> Schedule:
  """ZB-H1: weight gradients fill what 1F1B leaves idle (arXiv:2401.10241).

  One action a tick. Stage s takes the weight gradients of a micro-batch s
  backward actions late, so that P micro-batches are in flight on every stage,
  as many as on the first one of 1F1B.
  """
  P, M = num_stages, num_micro
  sequences = []
  for s in range(P):
    warmup = min(P - s, M)
    actions = [(FORWARD, m) for m in range(warmup)]
    for m in range(M):
      actions.append((BACKWARD, m))
      if m >= s:
        actions.append((WEIGHT, m - s))
      if warmup + m < M:
        actions.append((FORWARD, warmup + m))
    actions += [(WEIGHT, m) for m in range(max(M - s, 0), M)]
    sequences.append(actions)
  return Schedule(
    name="zero_bubble",
    num_micro=M,
    num_chunks=1,
    table=in_order(sequences),
    actions=(FORWARD, BACKWARD, WEIGHT),
  )


def evaluation(num_stages: int, num_micro: int, num_chunks: int) -> Schedule:
  """Forward actions alone, each as early as it can be.

  Where the last group of micro-batches is not full, its places stay empty.
  """
  P, M, V = num_stages, num_micro, num_chunks
  whole = interleaved(P, -(-M // P) * P, V).table
  table = np.where(whole[..., :1] < M, whole, -1)
  table[:, :, BACKWARD] = -1
  last = np.flatnonzero((table >= 0).any(axis=(1, 2, 3)))[-1]
  return Schedule(
    name="evaluation",
    num_micro=M,
    num_chunks=V,
    table=table[: last + 1],
    actions=(FORWARD,),
  )


def in_order(sequences: Sequence[Sequence[tuple[int, int]]]) -> np.ndarray:
  """Places each stage's actions one a tick, each as early as it can be.

  Args:
    sequences: of each stage, (action, micro-batch) in the order to take them.

  Returns:
    A table with one chunk a stage.

  Raises:
    ValueError: the stages wait for each other.
  """
  P = len(sequences)
  done: dict[tuple[int, int, int], int] = {}
  rows, left = [], [list(actions) for actions in sequences]
  while any(left):
    row = _empty(1, P)[0]
    for s in range(P):
      if left[s]:
        action, m = left[s][0]
        needs = _needs(action, m, s, P)
        if all(done.get(need, len(rows)) < len(rows) for need in needs):
          row[s, action] = m, 0
          done[action, m, s] = len(rows)
          left[s].pop(0)
    if (row < 0).all():
      raise ValueError(f"stages wait for each other; left: {left}")
    rows.append(row)
  return np.stack(rows)


def validate(schedule: Schedule) -> None:
  """Checks that a table can be run and computes every gradient once.

  Raises:
    ValueError: an action is missing, there twice, or before what it needs.
  """
  M, V = schedule.num_micro, schedule.num_virtual
  wanted = schedule.actions
  for action in range(3):
    cells = schedule.table[:, :, action]
    _, s = np.nonzero(cells[..., MICRO] >= 0)
    m, c = cells[cells[..., MICRO] >= 0].T
    counts = np.zeros((M, V), np.int64)
    if (m >= M).any() or (c < 0).any() or (c >= schedule.num_chunks).any():
      raise ValueError(f"action {action} of a micro-batch or chunk unknown")
    np.add.at(counts, (m, c * schedule.num_stages + s), 1)
    if (counts != (action in wanted)).any():
      raise ValueError(
        f"action {action}: counts by micro-batch and virtual stage are {counts}"
      )
  at = ticks(schedule)
  for action in wanted:
    for m in range(M):
      for v in range(V):
        for need in _needs(action, m, v, V):
          # On one stage the actions of a tick follow each other.
          same = need[2] == v
          if at[need] > at[action, m, v] - (not same):
            raise ValueError(
              f"action {action} of micro-batch {m} on virtual stage {v} is in"
              f" tick {at[action, m, v]}, but it needs action {need[0]} of"
              f" virtual stage {need[2]}, in tick {at[need]}"
            )


def ticks(schedule: Schedule) -> np.ndarray:
  """The tick of each action, int64 [3, M, P V]; -1: there is none."""
  at = np.full((3, schedule.num_micro, schedule.num_virtual), -1)
  for t, s, action in np.argwhere(schedule.table[..., MICRO] >= 0):
    m, c = schedule.table[t, s, action]
    at[action, m, c * schedule.num_stages + s] = t
  return at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Time of one micro-batch on a whole stage, in any unit.

  Attributes:
    forward: of its layers.
    backward: of the gradients of its input, and of what is computed again.
    weight: of the gradients of its weights.
  """

  forward: float = 1.0
  backward: float = 1.0
  weight: float = 1.0

  @property
  def total(self) -> float:
    """Of all actions."""
    return self.forward + self.backward + self.weight


def tick_costs(schedule: Schedule, costs: Costs) -> np.ndarray:
  """Time of each tick, float64 [ticks]: that of its slowest stage."""
  each = np.array([costs.forward, costs.backward, costs.weight])
  if not schedule.split:
    each[BACKWARD] += costs.weight
  busy = schedule.table[..., MICRO] >= 0
  return (busy @ each).max(axis=1) / schedule.num_chunks


def cost(schedule: Schedule, costs: Costs) -> float:
  """Time of a step."""
  return float(tick_costs(schedule, costs).sum())


def bubble(schedule: Schedule, costs: Costs) -> float:
  """The part of a step's time in which a stage waits."""
  return 1.0 - schedule.num_micro * costs.total / cost(schedule, costs)


def _empty(num_ticks: int, num_stages: int) -> np.ndarray:
  return np.full((num_ticks, num_stages, 3, 2), -1, np.int32)


def _needs(action: int, m: int, v: int, num_virtual: int) -> list:
  """The actions (action, micro-batch, virtual stage) that one waits for."""
  if action == FORWARD:
    return [(FORWARD, m, v - 1)] if v else []
  if action == WEIGHT:
    return [(BACKWARD, m, v)]
  last = v == num_virtual - 1
  return [(FORWARD, m, v)] + ([] if last else [(BACKWARD, m, v + 1)])
