"""Schedules against closed forms in numpy and against optax's."""

import math

import numpy as np
import optax
import pytest

from tests.tolerances import tolerance
from train.config import ScheduleConfig
from train.schedules import make_schedule

N, W, PEAK, RATIO = 50, 7, 3e-4, 0.2
RTOL = tolerance("elementwise")["rtol"]


def rates(config: ScheduleConfig, num_steps: int = N) -> np.ndarray:
  schedule = make_schedule(config, num_steps)
  return np.array([float(schedule(step)) for step in range(num_steps + 3)])


def config(kind: str, **changes) -> ScheduleConfig:
  return ScheduleConfig(
    kind=kind, peak=PEAK, warmup_steps=W, final_ratio=RATIO, **changes
  )


def closed_form(kind: str, step: int) -> float:
  if step < W:
    return PEAK * (step + 1) / W
  p = min(1.0, (step - W) / (N - W))
  return (
    PEAK
    * {
      "constant": 1.0,
      "linear": 1 - (1 - RATIO) * p,
      "cosine": RATIO + (1 - RATIO) * (1 + math.cos(math.pi * p)) / 2,
      # The last 0.3 * 50 = 15 steps.
      "wsd": 1 - (1 - RATIO) * min(1.0, max(0, step - 35) / 15),
    }[kind]
  )


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_closed_form(kind):
  want = [closed_form(kind, step) for step in range(N + 3)]
  got = rates(config(kind, decay_fraction=0.3))
  np.testing.assert_allclose(got, want, rtol=RTOL)


@pytest.mark.parametrize(
  "kind, after",
  [
    ("constant", optax.constant_schedule(PEAK)),
    ("linear", optax.linear_schedule(PEAK, PEAK * RATIO, N - W)),
    ("cosine", optax.cosine_decay_schedule(PEAK, N - W, RATIO)),
    ("wsd", optax.linear_schedule(PEAK, PEAK * RATIO, 15, 35 - W)),
  ],
)
def test_optax(kind, after):
  warmup = optax.linear_schedule(PEAK / W, PEAK, W - 1)
  theirs = optax.join_schedules([warmup, after], [W])
  want = [float(theirs(step)) for step in range(N + 3)]
  got = rates(config(kind, decay_fraction=0.3))
  np.testing.assert_allclose(got, want, rtol=RTOL)


def test_warmup_fraction():
  by_steps = rates(ScheduleConfig(warmup_steps=5))
  by_fraction = rates(ScheduleConfig(warmup_fraction=0.1))
  np.testing.assert_array_equal(by_steps, by_fraction)


def test_no_warmup_starts_at_the_peak_and_no_step_is_wasted():
  got = rates(ScheduleConfig(warmup_steps=0, final_ratio=0.0))
  assert got[0] == np.float32(2e-4)
  assert np.all(got[:N] > 0)


def test_phases_longer_than_the_run():
  with pytest.raises(ValueError, match="warmup_steps=60 is more than the 50"):
    make_schedule(ScheduleConfig(warmup_steps=60), N)
  with pytest.raises(ValueError, match="7 steps of warm-up and 45 of decay"):
    make_schedule(config("wsd", decay_fraction=0.9), N)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"peak": 0.0}, "schedule.peak"),
    ({"warmup_steps": -1}, "schedule.warmup_steps"),
    ({"warmup_fraction": 1.5}, "schedule.warmup_fraction"),
  ],
)
def test_bad_values(changes, message):
  with pytest.raises(ValueError, match=message):
    ScheduleConfig(**changes)
