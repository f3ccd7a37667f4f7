"""Real processes through the ordinary main equal one process.

Two devices a process, gloo between them; packing, two sources and dropout.
"""

import signal
import sys
import time

import numpy as np
import pytest

from configs import cli
from data import tokenizer
from data.loader import open_loader
from tests.tolerances import tolerance
from tests.train import hosts_run, tiny, tiny_run
from tests.train.hosts_run import command
from train import checkpoint, launch, monitor, pretrain

BOUND = tolerance("mesh")["rtol"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  tiny_run.write_data(folder)
  return folder


def alone(folder, workdir, **settings):
  """Runs in this process, on eight devices of which `mesh` names the use."""
  config = cli.override(hosts_run.config(str(folder)), settings)
  return pretrain.run(config, str(workdir))


@pytest.fixture(scope="module")
def unbroken(folder):
  """One process, two devices, never stopped."""
  alone(folder, folder / "unbroken", **{"mesh.data": "1"})
  return folder / "unbroken"


def check_equal(workdir, unbroken):
  """Losses, weights and moments, but for rounding."""
  lines = monitor.read(workdir / "metrics.jsonl")
  others = monitor.read(unbroken / "metrics.jsonl")
  for line, other in zip(lines, others, strict=True):
    for name in ("step", "tokens", "weight_sum"):
      assert line[name] == other[name]
    for name in ("loss", "grad_norm", "param_norm", "held_out_loss"):
      assert (name in line) == (name in other)
      if name in line:
        np.testing.assert_allclose(line[name], other[name], rtol=BOUND)
  ours, theirs = hosts_run.last_state(workdir), hosts_run.last_state(unbroken)
  assert ours.keys() == theirs.keys() and len(ours) > 30
  for name, distance in tiny.distances(ours, theirs).items():
    assert distance <= BOUND, name


def global_rows(folder, *steps: int) -> dict[int, list[list[str]]]:
  """Step -> documents by row, as one host reads them; `steps` of `range`."""
  data = hosts_run.config(str(folder)).data
  loader = open_loader(data, tokenizer.load(data.tokenizer), rows=slice(None))
  return {step: loader.batch(step)[1] for step in range(*steps)}


def test_two_processes_then_one(folder, unbroken, tmp_path):
  workdir = tmp_path / "run"
  log = hosts_run.launch(
    command(folder, workdir, "num_steps=8"), num_processes=2
  )
  assert "[0] " in log and "[1] " in log
  assert checkpoint.steps(workdir / "checkpoints") == [4, 8]
  # Each host reads its rows (`hosts_run.spy`), together those of the batch.
  assert hosts_run.documents(workdir, 2) == global_rows(folder, 8)
  assert (workdir / "report.html").is_file()
  alone(folder, workdir, **{"mesh.data": "1"})  # From step 8 on.
  check_equal(workdir, unbroken)


@pytest.mark.slow
def test_four_processes_then_two_then_one(folder, unbroken, tmp_path):
  workdir = tmp_path / "run"
  hosts_run.launch(command(folder, workdir, "num_steps=8"), num_processes=4)
  assert hosts_run.documents(workdir, 4) == global_rows(folder, 8)
  # Of the damaged one all of the next processes keep off.
  files = checkpoint.verify(workdir / "checkpoints", 8)["files"]
  largest = max(files, key=lambda name: files[name]["bytes"])
  data = workdir / "checkpoints" / "8" / largest
  data.write_bytes(bytes(reversed(data.read_bytes())))
  hosts_run.launch(command(folder, workdir, "num_steps=8"), num_processes=2)
  assert hosts_run.documents(workdir, 2) == global_rows(folder, 4, 8)
  hosts_run.launch(command(folder, workdir), num_processes=1)
  assert hosts_run.documents(workdir, 1) == global_rows(folder, 8, 12)
  check_equal(workdir, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_one_is_killed(folder, unbroken, tmp_path, num_processes, victim):
  workdir, heartbeat = tmp_path / "run", 6
  log = hosts_run.launch(
    command(folder, workdir),
    num_processes=num_processes,
    heartbeat_seconds=heartbeat,
    signal_at=f"{victim}:6:{signal.SIGKILL.value}",
    code=128 + signal.SIGKILL,
  )
  assert hosts_run.seconds_since_signal(workdir) < 2 * heartbeat
  who = f"process {victim} of {num_processes} was killed by SIGKILL"
  assert who in log
  assert log.count("[launch] process") == 1  # Those that it took along.
  assert f"the run resumes from {workdir}/checkpoints/4" in log
  hosts_run.launch(command(folder, workdir), num_processes=num_processes)
  assert hosts_run.documents(workdir, num_processes) == global_rows(folder, 12)
  check_equal(workdir, unbroken)


@pytest.mark.slow
def test_all_stop_at_one_step_when_one_is_told_to(folder, tmp_path):
  workdir = tmp_path / "run"
  log = hosts_run.launch(
    command(folder, workdir, "num_steps=1_000_000"),
    num_processes=2,
    signal_at=f"1:6:{signal.SIGTERM.value}",
    code=128 + signal.SIGTERM,
  )
  step = checkpoint.steps(workdir / "checkpoints")[-1]
  assert log.count(f"Stopped by SIGTERM after step {step}") == 2
  assert hosts_run.documents(workdir, 2) == global_rows(folder, step)
  assert "[launch] process" not in log  # Nobody died.


@pytest.mark.parametrize(
  ("code", "want"), [(-9, "was killed by SIGKILL"), (3, "exit code 3")]
)
def test_who_died_and_how(code, want, tmp_path, capfd):
  """The second process dies, the first would sleep on."""
  script = (
    "import os, sys, time\n"
    "if '--config.distributed.process_id=1' in sys.argv:\n"
    f"  os.kill(os.getpid(), 9) if {code} < 0 else sys.exit({code})\n"
    "print('here', flush=True)\n"
    "time.sleep(100)\n"
  )
  sleeper = [sys.executable, "-c", script, f"--workdir={tmp_path}"]
  start = time.monotonic()
  found = launch.launch(sleeper, num_processes=2, heartbeat_seconds=1)
  assert found == (code if code > 0 else 128 - code)
  assert time.monotonic() - start < 3
  out, err = capfd.readouterr()
  assert out == "[0] here\n"
  assert "process 1 of 2" in err and want in err
  assert "no checkpoint yet" in err


def test_all_end_well(capfd):
  assert (
    launch.launch(
      [sys.executable, "-c", "pass"], num_processes=2, heartbeat_seconds=1
    )
    == 0
  )
  assert "process" not in capfd.readouterr().err
