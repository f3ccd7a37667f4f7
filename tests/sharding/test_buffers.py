"""Buffers, replayed: every read finds what was meant for it."""

import numpy as np
from hypothesis import given

from sharding.buffers import plan
from sharding.schedules import (
  BACKWARD,
  gpipe,
  one_forward_one_backward,
  zero_bubble,
)
from tests.sharding.test_schedules import tables


@given(tables())
def test_every_read_finds_its_value(schedule):
  """A plain replay with dicts, by the rows alone."""
  P, last = schedule.num_stages, schedule.num_virtual - 1
  found = plan(schedule)
  rows = found.rows
  slots = [{name: {} for name in found.sizes} for _ in range(P)]
  arriving = [{} for _ in range(P)]
  for t in range(schedule.num_ticks):
    sent = [{} for _ in range(P)]
    for s in range(P):
      at = {name: int(column[t, s]) for name, column in rows.items()}
      keep = slots[s]
      for name in ("inputs", "gradients"):
        slot = at[f"{name}_arrives"]
        if slot >= 0:
          assert slot < found.sizes[name]
          keep[name][slot] = arriving[s][name]

      def read(buffer, action, m, v, at=at, keep=keep):
        slot = at[f"{action}_{buffer}"]
        assert keep[buffer][slot] == (m, v), (buffer, action, m, v)

      virtual = lambda action, at=at, s=s: at[f"{action}_chunk"] * P + s
      if (m := at["forward"]) >= 0:
        v = virtual("forward")
        if v > 0:
          read("inputs", "forward", m, v)
        else:
          assert at["forward_inputs"] == -1
        if v < last:
          sent[(s + 1) % P]["inputs"] = m, v + 1
        if schedule.split:
          keep["residuals"][at["forward_residuals"]] = m, v
      if (m := at["backward"]) >= 0:
        v = virtual("backward")
        if v > 0 and not schedule.split:
          read("inputs", "backward", m, v)
        if v < last:
          read("gradients", "backward", m, v)
        if v > 0:
          sent[(s - 1) % P]["gradients"] = m, v - 1
        if schedule.split:
          read("residuals", "backward", m, v)
          keep["cotangents"][at["backward_cotangents"]] = m, v
      if (m := at["weight"]) >= 0:
        read("residuals", "weight", m, virtual("weight"))
        read("cotangents", "weight", m, virtual("weight"))
    arriving = sent


def test_sizes_follow_micro_batches_or_stages():
  """GPipe keeps M inputs a stage, 1F1B about two a stage, whatever M is."""
  for P, M in ((4, 8), (4, 64), (8, 64)):
    assert plan(gpipe(P, M)).sizes == {"inputs": M, "gradients": 1}
    # Of 2 P - 1 in flight on the first stage, which has tokens for inputs.
    sizes = {"inputs": 2 * P - 3, "gradients": 1}
    assert plan(one_forward_one_backward(P, M)).sizes == sizes
    found = plan(zero_bubble(P, M)).sizes
    assert (found["residuals"], found["cotangents"]) == (P, P)


@given(tables())
def test_no_slot_is_wasted(schedule):
  """Some stage holds a value in every slot in one and the same tick."""
  found = plan(schedule)
  rows = found.rows
  last_use = "forward" if schedule.split else "backward"
  if BACKWARD not in schedule.actions:
    last_use = "forward"
  alive = np.zeros((schedule.num_ticks, schedule.num_stages), int)
  for s in range(schedule.num_stages):
    births = np.flatnonzero(rows["inputs_arrives"][:, s] >= 0)
    for t in births:
      slot = rows["inputs_arrives"][t, s]
      again = [
        u for u in births if u > t and rows["inputs_arrives"][u, s] == slot
      ]
      end = min(again, default=schedule.num_ticks)
      uses = np.flatnonzero(rows[f"{last_use}_inputs"][t:end, s] == slot)
      alive[t : t + uses.max() + 1, s] += 1
  assert alive.max() == found.sizes["inputs"]
