"""Where a pipeline keeps what has arrived but is not used yet.

From a table of `sharding/schedules.py` follows how long each value lives on its
stage, and from that a slot for it: two values that never live in the same tick
may share one. All stages hold buffers of the same size, that of the stage that
needs most. This file knows no JAX.
"""

import dataclasses

import numpy as np

from sharding.schedules import (
  BACKWARD,
  CHUNK,
  FORWARD,
  MICRO,
  WEIGHT,
  Schedule,
  ticks,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """A schedule with a slot for every value, as the executor reads it.

  Attributes:
    sizes: buffer -> its number of slots. "inputs": of a stage; "gradients":
      of its outputs; with split backward actions also "residuals", from a
      forward action to its weight gradients, and "cotangents", from the
      backward action to these.
    rows: column -> int32 [ticks, P]; -1: nothing. "forward", "backward" and
      "weight" are micro-batches, "*_chunk" their chunks; all others are slots:
      "X_arrives" takes what the tick before sent, "forward_inputs" says where
      the forward action reads its input, and so on.
  """

  sizes: dict[str, int]
  rows: dict[str, np.ndarray]


def plan(schedule: Schedule) -> Plan:
  """Gives each value a slot.

  Without split actions a stage computes its forward pass again and keeps its
  input until its backward action. With them it keeps what the gradients need.
  """
  P, M, V = schedule.num_stages, schedule.num_micro, schedule.num_virtual
  at = ticks(schedule)
  F, B, W = at
  never = np.full((M, 1), -1)
  # The first virtual stage has no input, the last no gradient from outside.
  sent = np.concatenate([never, F[:, :-1]], axis=1)
  returned = np.concatenate([B[:, 1:], never], axis=1)
  again = BACKWARD in schedule.actions and not schedule.split
  lives = {
    "inputs": (sent + 1, B if again else F, sent >= 0),
    "gradients": (returned + 1, B, returned >= 0),
  }
  if schedule.split:
    everywhere = np.ones((M, V), bool)
    lives |= {"residuals": (F, W, everywhere), "cotangents": (B, W, everywhere)}

  sizes, slots = {}, {}
  for name, (first, last, exists) in lives.items():
    slots[name] = _slots(first, last, exists, P)
    sizes[name] = int(slots[name].max(initial=-1)) + 1

  rows = {}
  m, c = schedule.table[..., MICRO], schedule.table[..., CHUNK]
  v = c * P + np.arange(P)[:, None]
  actions = {"forward": FORWARD, "backward": BACKWARD, "weight": WEIGHT}
  for name, action in actions.items():
    rows[name] = m[..., action]
    rows[f"{name}_chunk"] = c[..., action]
  reads = {
    "inputs": ("forward", "backward") if again else ("forward",),
    "gradients": ("backward",),
    "residuals": ("forward", "backward", "weight"),
    "cotangents": ("backward", "weight"),
  }
  for buffer, slot in slots.items():
    for name in reads[buffer]:
      here = m[..., actions[name]], v[..., actions[name]]
      rows[f"{name}_{buffer}"] = np.where(here[0] >= 0, slot[here], -1)
  for buffer in ("inputs", "gradients"):
    first, _, exists = lives[buffer]
    column = np.full(m.shape[:2], -1)
    for i, k in np.argwhere(exists):
      column[first[i, k], k % P] = slots[buffer][i, k]
    rows[f"{buffer}_arrives"] = column
  return Plan(
    sizes=sizes, rows={name: x.astype(np.int32) for name, x in rows.items()}
  )


def _slots(
  first: np.ndarray, last: np.ndarray, exists: np.ndarray, num_stages: int
) -> np.ndarray:
  """Slots of values [M, P V] that live from tick `first` to `last`, inclusive.

  The lowest free slot, in order of birth: as few as live at once.
  """
  slots = np.full(first.shape, -1)
  for s in range(num_stages):
    here = [
      i for i in map(tuple, np.argwhere(exists)) if i[1] % num_stages == s
    ]
    taken_until: list[int] = []
    for i in sorted(here, key=lambda i: first[i]):
      free = (n for n, end in enumerate(taken_until) if end < first[i])
      slot = next(free, len(taken_until))
      taken_until[slot:] = [last[i], *taken_until[slot + 1 :]]
      slots[i] = slot
  return slots
