"""The engine that every training loop calls: step, record, evaluate, save."""

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from train import checkpoint, guard, report
from train.config import CheckpointConfig, MonitorConfig
from train.monitor import FlopsPerToken, Monitor
from train.peak import Peak
from train.preemption import Preempted, catch_sigterm
from train.state import TrainState
from train.step import TrainStep

Batch = dict[str, np.ndarray]


class Batches(Protocol):
  """Where batches come from; a pure function of the step."""

  def iterate(self, start_step: int) -> Iterator[tuple[int, Batch, list]]:
    """Yields (step, this process's rows, document ids by row), endlessly."""

  def state(self, step: int) -> dict:
    """The position in the data before a step, to write beside a state."""


class LoopConfig(Protocol):
  """What the loop reads of a run's config; the rest it only writes down."""

  num_steps: int
  checkpoint: CheckpointConfig
  monitor: MonitorConfig


def fit(
  state: TrainState,
  train_step: TrainStep,
  batches: Batches,
  *,
  config: LoopConfig,
  workdir: pathlib.Path,
  place: Callable[[Batch], Mapping[str, jax.Array]],
  evaluate: Callable[..., Mapping[str, float]] | None = None,
  natural: Callable[[TrainState], TrainState] = lambda state: state,
  flops: FlopsPerToken | None = None,
  peak: Peak | None = None,
  label: str = "train",
) -> tuple[TrainState, list[dict]]:
  """Trains from `state.step` to `config.num_steps`.

  Args:
    state: where to start; it is donated.
    train_step: from `train.step`.
    batches: begins at the state's step.
    config: of the run; saved with every checkpoint.
    workdir: the run folder.
    place: host rows -> global arrays.
    evaluate: model -> metrics on held-out data.
    natural: a state of `train_step` -> the same as a checkpoint has it, with
      its layers in the order of the model.
    flops: per token, for MFU.
    peak: of the mesh, for MFU.
    label: name of the loop, for the bar.

  Returns:
    The last state, as a checkpoint has it, and the lines of metrics.jsonl.

  Raises:
    NonFiniteError: the loss or a gradient was NaN or infinite. No such state
      is saved.
    Preempted: SIGTERM came; the state is saved. A `SystemExit`, code 143.
  """
  # ---- Records ----
  start = int(state.step)
  saver = checkpoint.Saver(
    workdir / "checkpoints",
    keep=config.checkpoint.keep,
    config=dataclasses.asdict(config)
    | {"model": dataclasses.asdict(state.model.config)},
    start_step=start,
  )

  def check(step, metrics, document_ids):
    guard.check(step, metrics, document_ids, workdir=workdir, saver=saver)

  monitor = Monitor(
    workdir,
    config=config.monitor,
    num_steps=config.num_steps,
    start_step=start,
    check=check,
    flops=flops,
    peak=peak,
    label=label,
  )

  # ---- Steps ----
  stream = batches.iterate(start)
  leaves = jax.tree.leaves(state)
  with (
    contextlib.closing(saver),
    contextlib.closing(monitor),
    contextlib.closing(stream),
    catch_sigterm() as stop,
  ):
    for done in range(start + 1, config.num_steps + 1):
      last = done == config.num_steps
      saving = last or done % config.checkpoint.every == 0
      evaluating = evaluate is not None and (
        last or done % config.monitor.eval_every == 0
      )
      _, rows, document_ids = next(stream)
      batch = place(rows)
      leaves, metrics = train_step.on_leaves(leaves, batch)
      monitor.record(
        done,
        metrics,
        tokens=_num_tokens(rows, batch),
        document_ids=document_ids,
        log=saving or evaluating,
      )
      if evaluating:
        monitor.wait()  # A spoilt state is not worth an evaluation.
        monitor.add(evaluate(train_step.tree.unflatten(leaves).model))
      stopping = stop(done)
      if saving or stopping:
        monitor.flush()  # Raises, where the state is not worth saving.
        state = natural(train_step.tree.unflatten(leaves))
        saver.save(done, state, batches.state(done))
      if stopping:
        break

  # ---- Report ----
  if start >= config.num_steps:
    state = natural(state)
  if jax.process_index() == 0:
    run = report.load_run(workdir)
    report.write(workdir / "report.html", [run], title=f"{label}: {run.name}")
  if int(state.step) < config.num_steps:
    raise _preempted(saver, int(state.step))
  return state, monitor.history


def _num_tokens(rows: Batch, batch: Mapping[str, jax.Array]) -> jax.Array | int:
  """Tokens in a global batch, of which `rows` are on this host."""
  if jax.process_count() == 1:
    return int(np.count_nonzero(rows["segment_ids"]))
  return _count_nonzero(batch["segment_ids"])


_count_nonzero = jax.jit(jnp.count_nonzero)


def _preempted(saver: checkpoint.Saver, step: int) -> Preempted:
  """Says where to go on."""
  error = Preempted(
    f"Stopped by SIGTERM after step {step}, saved as {saver.newest()}."
    " Run again with the same workdir to continue."
  )
  print(error, file=sys.stderr)
  return error
