"""Stops a run whose loss or gradients are no longer finite."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax

from train.checkpoint import Saver

_MAX_SHOWN = 10


class NonFiniteError(ArithmeticError):
  """The loss, a gradient or a weight became NaN or infinite."""


def check(
  step: int,
  metrics: Mapping[str, float],
  document_ids: Sequence[Sequence[str]],
  *,
  workdir: pathlib.Path,
  saver: Saver,
) -> None:
  """Raises if the metrics of a step tell that its state is spoilt.

  Args:
    step: the update that the metrics are of.
    metrics: of the step, on the host.
    document_ids: of the documents in its batch, row by row. All of them go
      to `workdir/nonfinite.json`, those of process N > 0 to nonfinite.N.json.
    workdir: the run folder.
    saver: knows the newest checkpoint. It is good: no state is saved before
      its own step was checked.

  Raises:
    NonFiniteError: names the step, the documents and the checkpoint.
  """
  bad = {
    name: metrics[name]
    for name in ("loss", "grad_norm", "param_norm")
    if name in metrics and not math.isfinite(metrics[name])
  }
  if not bad:
    return
  process = jax.process_index()
  path = workdir / f"nonfinite{f'.{process}' if process else ''}.json"
  report = {"step": step, "metrics": {k: str(v) for k, v in metrics.items()}}
  path.write_text(json.dumps(report | {"document_ids": document_ids}, indent=1))
  ids = list(dict.fromkeys(name for row in document_ids for name in row))
  shown = ", ".join(ids[:_MAX_SHOWN])
  if len(ids) > _MAX_SHOWN:
    shown += f" and {len(ids) - _MAX_SHOWN} more"
  what = ", ".join(f"{name} is {value}" for name, value in bad.items())
  checkpoint = saver.newest()
  last = (
    f"The last good checkpoint is {checkpoint}; running again with the same"
    " workdir continues from it."
    if checkpoint
    else "There is no checkpoint yet."
  )
  raise NonFiniteError(
    f"Step {step}: {what}. Its batch holds the documents {shown} (by row in"
    f" {path}). {last} If the step fails again, lower schedule.peak or"
    " optimizer.clip_norm, or remove the documents."
  )
