"""Killed at random moments, a run ends as if nothing had happened.

A real process of `train.pretrain` gets SIGKILL, during saves as well, and is
started again, until it ends. Its checkpoint must be that of a run that was
left alone, bit by bit, and each batch must have held the same documents in the
same order, as often as it was computed.
"""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.train import tiny_run
from train import checkpoint, monitor

ROOT = pathlib.Path(__file__).parents[2]


def start(folder: pathlib.Path, workdir: pathlib.Path) -> subprocess.Popen:
  workdir.mkdir(exist_ok=True)
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "2",
  }
  with open(workdir / "log.txt", "a") as log:
    return subprocess.Popen(
      [sys.executable, "-m", "tests.train.tiny_run", folder, workdir],
      cwd=ROOT,
      env=environment,
      stdout=log,
      stderr=log,
    )


def documents(workdir: pathlib.Path) -> dict[int, str]:
  """Step -> documents of its batch, equal at each time it was read."""
  found = {}
  path = workdir / "documents.txt"
  for line in path.read_text().splitlines() if path.exists() else []:
    step, _, names = line.partition(" ")
    if names.endswith("]]"):  # The last line before a kill may be cut.
      assert found.setdefault(int(step), names) == names
  return found


def last_state(workdir: pathlib.Path) -> dict[str, np.ndarray]:
  """The arrays of the last checkpoint, by name."""
  folder, step = workdir / "checkpoints", tiny_run.NUM_STEPS
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  wanted = {
    name: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"], sharding=here)
    for name, leaf in checkpoint.verify(folder, step)["leaves"].items()
  }
  return jax.device_get(checkpoint.restore(folder, step, wanted).state)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """Data, and the folder of a run that was left alone."""
  folder = tmp_path_factory.mktemp("data")
  tiny_run.write_data(folder)
  workdir = folder / "undisturbed"
  process = start(folder, workdir)
  assert process.wait(300) == 0, (workdir / "log.txt").read_text()
  return folder, workdir


def wait_for_moment(process, workdir, step: int, in_save: bool) -> bool:
  """Waits until a step was read, and a save is going on; False: it ended."""
  checkpoints = workdir / "checkpoints"
  while process.poll() is None:
    if max(documents(workdir), default=-1) >= step:
      if not in_save or list(checkpoints.glob("*.orbax-checkpoint-tmp*")):
        return True
    time.sleep(0.001)
  return False


def size_of_documents(workdir) -> int:
  path = workdir / "documents.txt"
  return path.stat().st_size if path.exists() else 0


def ending(workdir, started: int) -> bool:
  """Whether the last step was read since the file had `started` bytes."""
  text = (workdir / "documents.txt").read_bytes()[started:]
  return b"\n%d " % (tiny_run.NUM_STEPS - 1) in b"\n" + text


def soak(folder, workdir, *, steps: list[int], seed: int) -> None:
  """Kills a run once a step, every other time in a save; lets it end."""
  rng = random.Random(seed)
  kills = in_saves = 0
  for i, step in enumerate(steps):
    seen = max(documents(workdir), default=-1)
    in_save = i % 2 == 1
    started = size_of_documents(workdir)
    process = start(folder, workdir)
    if wait_for_moment(process, workdir, step, in_save):
      # A step that was seen before a restart: in imports, restore, compilation.
      delay = 0 if in_save else rng.uniform(0, 4 if seen >= step else 0.1)
      until = time.monotonic() + delay
      while time.monotonic() < until and not ending(workdir, started):
        time.sleep(0.001)
      process.kill()
    if process.wait() == -signal.SIGKILL:
      kills += 1
      in_saves += in_save
  assert kills == len(steps)
  assert in_saves >= kills // 2
  process = start(folder, workdir)
  assert process.wait(300) == 0, (workdir / "log.txt").read_text()


def check_equal(workdir, undisturbed) -> None:
  ours, theirs = last_state(workdir), last_state(undisturbed)
  assert ours.keys() == theirs.keys()
  assert len(ours) > 30
  for name, array in ours.items():
    assert np.array_equal(array, theirs[name]), name
  assert documents(workdir) == documents(undisturbed)
  assert len(documents(workdir)) == tiny_run.NUM_STEPS
  lines = monitor.read(workdir / "metrics.jsonl")
  others = monitor.read(undisturbed / "metrics.jsonl")
  for line, other in zip(lines, others, strict=True):
    for name in ("step", "loss", "grad_norm", "tokens"):
      assert line[name] == other[name]


def test_three_kills(undisturbed):
  folder, left_alone = undisturbed
  workdir = folder / "killed"
  soak(folder, workdir, steps=[6, 13, 25], seed=1)
  check_equal(workdir, left_alone)


@pytest.mark.slow
def test_twenty_kills(undisturbed):
  folder, left_alone = undisturbed
  workdir = folder / "killed_often"
  steps = sorted(random.Random(2).choices(range(1, 26), k=20))
  soak(folder, workdir, steps=steps, seed=3)
  check_equal(workdir, left_alone)
