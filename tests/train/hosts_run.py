"""A run of several processes: a config file, and what tests read of a run.

  python -m train.launch -- python -m train.pretrain \
    --config=tests/train/hosts_run.py:FOLDER --workdir=DIR

FOLDER is that of `tiny_run.write_data`. In each process the data is spied on:
what a host reads of the tokens is checked, and the documents of each batch go
to DIR/documents.I_of_N.txt. With SIGNAL_AT=PROCESS:STEP:NUMBER in the
environment, that process sends itself a signal before that step, and writes
down when.
"""

import ast
import dataclasses
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
from absl import flags

from configs import cli
from data.config import TokenSource
from data.loader import Loader
from sharding.axes import MeshConfig
from tests.train import tiny_run
from train import checkpoint
from train.config import OptimizerConfig
from train.run_config import PretrainConfig

ROOT = pathlib.Path(__file__).parents[2]
# document ids by row, of one batch
Rows = list[list[str]]


def config(folder: str) -> PretrainConfig:
  """Two packed sources; fsdp within a process, data across processes."""
  base = tiny_run.config(pathlib.Path(folder))
  sources = (
    TokenSource(path=f"{folder}/train", weight=3.0),
    TokenSource(path=f"{folder}/held_out", weight=1.0),
  )
  return dataclasses.replace(
    base,
    data=dataclasses.replace(
      base.data, sources=sources, global_batch_size=8, prefetch_threads=1
    ),
    num_steps=12,
    monitor=dataclasses.replace(base.monitor, eval_every=4),
    mesh=MeshConfig(data=-1, fsdp=2),
    # With eps 1e-8 the rounding of gradients near 0 alone reaches 2e-5.
    optimizer=OptimizerConfig(eps=1e-4),
  )


def get_config(folder: str) -> PretrainConfig:
  """What the processes run."""
  spy(pathlib.Path(flags.FLAGS.workdir))
  return config(folder)


class _CountedTokens:
  """The tokens of a store; counts how many are read."""

  def __init__(self, tokens):
    self._tokens = tokens
    self.read = 0

  def __getitem__(self, index):
    self.read += len(index)
    return self._tokens[index]


def spy(workdir: pathlib.Path) -> None:
  """Checks what is read, and writes down the documents of each batch."""
  batch_of, iterate = Loader.batch, Loader.iterate
  at, _, number = os.environ.get("SIGNAL_AT", "").rpartition(":")

  def batch(self, step):
    for store in self.datasets:
      if not isinstance(store.tokens, _CountedTokens):
        store.tokens = _CountedTokens(store.tokens)
    before = sum(store.tokens.read for store in self.datasets)
    batch, document_ids = batch_of(self, step)
    read = sum(store.tokens.read for store in self.datasets) - before
    # A token once as input and once as target, and none of other rows.
    assert read == 2 * np.count_nonzero(batch["segment_ids"])
    assert len(document_ids) == len(self.rows)
    return batch, document_ids

  def recorded(self, start_step=0):
    for step, batch, document_ids in iterate(self, start_step):
      if self.num_batches is None:  # The training data, not the held-out.
        who = f"{jax.process_index()}_of_{jax.process_count()}"
        path = workdir / f"documents.{who}.txt"
        with open(path, "a") as file:
          file.write(f"{step} {document_ids}\n")
        if f"{jax.process_index()}:{step}" == at:
          (workdir / "signal_time.txt").write_text(f"{time.time()}")
          os.kill(os.getpid(), int(number))
      yield step, batch, document_ids

  Loader.batch, Loader.iterate = batch, recorded


def documents(workdir: pathlib.Path, num_processes: int) -> dict[int, Rows]:
  """Step -> rows of the global batch, as so many processes read them."""
  found: dict[int, Rows] = {}
  for i in range(num_processes):
    path = workdir / f"documents.{i}_of_{num_processes}.txt"
    steps = {}
    for line in path.read_text().splitlines():
      step, _, rows = line.partition(" ")
      # The same each time that it was read; a kill may cut the last line.
      if rows.endswith("]]"):
        rows = ast.literal_eval(rows)
        assert steps.setdefault(int(step), rows) == rows
    for step, rows in steps.items():
      found.setdefault(step, []).extend(rows)
  return found


def seconds_since_signal(workdir: pathlib.Path) -> float:
  """How long ago a process sent itself the signal."""
  return time.time() - float((workdir / "signal_time.txt").read_text())


def command(folder, workdir, *settings: str) -> list[str]:
  """The ordinary main, with settings KEY=VALUE."""
  arguments = [
    f"--config=tests/train/hosts_run.py:{folder}",
    f"--workdir={workdir}",
    *(f"--config.{setting}" for setting in settings),
  ]
  return [sys.executable, "-m", "train.pretrain", *arguments]


def command_of(main: str, config, workdir: pathlib.Path) -> list[str]:
  """Another main, with a config as it is; it goes through a file."""
  workdir.mkdir(exist_ok=True)
  kind = type(config)
  text = f"from {kind.__module__} import {kind.__name__}\n"
  text += "from configs import cli\n\n\ndef get_config():\n"
  text += f"  return cli.from_dict({kind.__name__}, {cli.to_dict(config)!r})\n"
  path = workdir / "config.py"
  path.write_text(text)
  arguments = [f"--config={path}", f"--workdir={workdir}"]
  return [sys.executable, "-m", main, *arguments]


def environment(signal_at: str = "") -> dict[str, str]:
  """Two devices a process."""
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "2",
    "SIGNAL_AT": signal_at,
  }


def launch(
  command: list[str],
  *,
  num_processes: int,
  heartbeat_seconds: int = 30,
  signal_at: str = "",
  code: int = 0,
) -> str:
  """Runs the launcher to its end; returns what was printed.

  Args:
    command: a main, from `command` or `command_of`.
    num_processes: how many.
    heartbeat_seconds: of the launcher and its processes.
    signal_at: see the head of this file.
    code: that the launcher must return.
  """
  arguments = [f"--num_processes={num_processes}"]
  arguments += [f"--heartbeat_seconds={heartbeat_seconds}", "--"]
  launcher = subprocess.run(
    [sys.executable, "-m", "train.launch", *arguments, *command],
    cwd=ROOT,
    env=environment(signal_at),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  assert launcher.returncode == code, launcher.stdout
  return launcher.stdout


def last_state(workdir: pathlib.Path) -> dict[str, np.ndarray]:
  """The arrays of the newest checkpoint, by name."""
  path = checkpoint.newest(workdir / "checkpoints")
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  wanted = {
    name: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"], sharding=here)
    for name, leaf in checkpoint.verify(path.parent, int(path.name))[
      "leaves"
    ].items()
  }
  restored = checkpoint.restore(path.parent, int(path.name), wanted)
  return jax.device_get(restored.state)
