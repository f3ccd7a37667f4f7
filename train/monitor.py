"""What a run writes down: metrics.jsonl, TensorBoard events, a progress bar.

Metrics are read one step late: while the devices compute a step, the host
fetches those of the step before, so nobody waits for the other.
"""

import collections
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import tqdm

from train.config import MonitorConfig
from train.peak import Peak

FILE = "metrics.jsonl"
PEAK_FILE = "peak.json"  # What MFU is measured against.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
  """Training FLOPs a token, forward and backward; see `model.accounting`.

  Attributes:
    exact: of the model, attention only where the mask allows.
    full: of the model, attention as T x T (PaLM's convention).
    hardware: `exact` and what rematerialisation computes again.
  """

  exact: float
  full: float
  hardware: float


@dataclasses.dataclass(frozen=True)
class _Pending:
  """A step that the devices may still be computing."""

  step: int
  metrics: Mapping[str, jax.Array]
  tokens: jax.Array | int
  document_ids: Sequence[Sequence[str]]
  logged: bool


class Monitor:
  """Records the metrics of one run.

  Attributes:
    history: the lines of metrics.jsonl, those before a restart included.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    *,
    config: MonitorConfig,
    num_steps: int,
    start_step: int,
    check: Callable[[int, Mapping, Sequence], None],
    flops: FlopsPerToken | None = None,
    peak: Peak | None = None,
    label: str = "",
  ):
    """Opens the records; lines after `start_step` are cut off.

    Args:
      workdir: the run folder.
      config: how often, and where to.
      num_steps: steps of the whole run.
      start_step: steps that are done.
      check: called with (step, metrics, document ids) for every step, before
        anything later of the run is saved.
      flops: per token; None: no MFU.
      peak: of the mesh; None: no MFU.
      label: name of the loop, before the bar.
    """
    self._config = config
    self._num_steps = num_steps
    self._check = check
    self._flops = flops
    self._peak = peak
    self._writes = jax.process_index() == 0
    self._path = workdir / FILE
    self.history = read(self._path, until=start_step)
    self._tokens = self.history[-1].get("tokens", 0) if self.history else 0
    self._pending: _Pending | None = None
    self._line: dict | None = None
    # (seconds, step, tokens) when the metrics of the newest steps arrived.
    self._clock: collections.deque = collections.deque(
      maxlen=1 + max(10, config.log_every)
    )
    self._events = None
    self._start_step = self._last_step = start_step
    if self._writes:
      partial = workdir / f"{FILE}.partial"
      partial.write_text("".join(_dump(line) for line in self.history))
      partial.replace(self._path)
      if peak is not None:
        (workdir / PEAK_FILE).write_text(json.dumps(dataclasses.asdict(peak)))
      self._file = open(self._path, "a")  # noqa: SIM115  Closed by `close`.
    is_terminal = sys.stderr.isatty()
    self._bar = tqdm.tqdm(
      total=num_steps,
      initial=start_step,
      desc=label,
      unit="step",
      dynamic_ncols=True,
      mininterval=0.2 if is_terminal else 10,
      disable=not self._writes,
    )
    if peak is not None:
      self._say(f"MFU is of {peak.source}.")

  def record(
    self,
    step: int,
    metrics: Mapping[str, jax.Array],
    *,
    tokens: jax.Array | int,
    document_ids: Sequence[Sequence[str]],
    log: bool = False,
  ) -> None:
    """Takes the metrics of a step that was just dispatched.

    Args:
      step: updates that will be done when it is.
      metrics: float32 scalars on the devices.
      tokens: in its batch, over all processes, without padding; on the
        devices where no host knows.
      document_ids: of its batch, row by row.
      log: write a line, even where `log_every` does not ask for one.
    """
    for value in metrics.values():
      value.copy_to_host_async()
    self._finish()
    log = (
      log or step % self._config.log_every == 0 or step in (1, self._num_steps)
    )
    self._pending = _Pending(step, metrics, tokens, document_ids, log)

  def wait(self) -> None:
    """Waits for the newest step and checks it."""
    self._finish()

  def add(self, values: Mapping[str, float]) -> None:
    """Adds values to the line of the newest step, as an evaluation does.

    What happened since that step stays out of the throughput.
    """
    self._finish()
    self._line = (self._line or {"step": self._last_step}) | values
    shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    self._say(f"Step {self._last_step}: {shown}")
    self._clock.clear()
    self._clock.append((time.perf_counter(), self._last_step, self._tokens))

  def flush(self) -> None:
    """Waits for the newest step, checks it and puts its line on disk."""
    self._finish()
    self._write()

  def close(self) -> None:
    """Closes the records; a step that was not waited for is left out."""
    self._write()
    self._bar.close()
    if self._writes:
      self._file.close()
    if self._events is not None:
      self._events.close()

  def _say(self, text: str) -> None:
    """Prints a line above the bar."""
    if self._writes:
      self._bar.write(text, file=sys.stderr)

  def _finish(self) -> None:
    """Fetches the pending step's metrics, checks them, prepares the line."""
    if self._pending is None:
      return
    pending, self._pending = self._pending, None
    metrics = {k: float(v) for k, v in pending.metrics.items()}
    now = time.perf_counter()
    self._check(pending.step, metrics, pending.document_ids)
    self._write()
    self._last_step = pending.step
    self._tokens += int(pending.tokens)
    self._bar.update(1)
    self._clock.append((now, pending.step, self._tokens))
    if pending.logged:
      self._line = {
        "step": pending.step,
        **_with_perplexity(metrics),
        "tokens": self._tokens,
        **self._throughput(),
      }
      self._bar.set_postfix_str(_summary(self._line), refresh=False)

  def _throughput(self) -> dict[str, float]:
    """Means over the last ten steps (or `log_every`), without evaluations.

    None for the first step, which is compiled.
    """
    then, last_step, last_tokens = self._clock[0]
    now, step, tokens = self._clock[-1]
    if step == last_step:
      return {}
    rate = (tokens - last_tokens) / (now - then)
    values = {
      "step_seconds": (now - then) / (step - last_step),
      "tokens_per_second": rate,
    }
    if self._flops is not None and self._peak is not None:
      share = rate / self._peak.flops_per_second
      values |= {
        "mfu": self._flops.exact * share,
        "mfu_full": self._flops.full * share,
        "hfu": self._flops.hardware * share,
      }
    return values

  def _write(self) -> None:
    """Appends the prepared line to every record."""
    line, self._line = self._line, None
    if line is None:
      return
    self.history.append(line)
    if not self._writes:
      return
    self._file.write(_dump(line))
    self._file.flush()
    if not self._config.tensorboard:
      return
    if self._events is None:
      import tensorboardX  # 0.2 s; not before the first step.

      self._events = tensorboardX.SummaryWriter(
        str(self._path.parent), purge_step=self._start_step + 1
      )
    for name, value in line.items():
      if name != "step":
        self._events.add_scalar(name, value, line["step"])


def read(path: pathlib.Path, *, until: int | None = None) -> list[dict]:
  """Reads metrics.jsonl up to a step; a half-written line ends it."""
  if not path.is_file():
    return []
  history = []
  for text in path.read_text().splitlines():
    try:
      line = json.loads(text)
    except ValueError:
      break  # The process was killed while it wrote.
    if until is None or line["step"] <= until:
      history.append(line)
  return history


def _with_perplexity(metrics: Mapping) -> dict:
  """A language model's perplexity is that of its likelihood alone."""
  if "nll" not in metrics:
    return dict(metrics)
  return metrics | {"ppl": math.exp(min(metrics["nll"], 700.0))}


def _dump(line: Mapping) -> str:
  """One line of JSON, which has no NaN."""
  plain = {
    name: value if math.isfinite(value) else None
    for name, value in line.items()
  }
  return json.dumps(plain) + "\n"


def _summary(line: Mapping) -> str:
  """Loss, throughput and utilisation for the bar."""
  parts = [f"loss {line['loss']:.4g}"]
  if "tokens_per_second" in line:
    parts.append(f"{line['tokens_per_second']:,.0f} tokens/s")
  if "mfu" in line:
    parts.append(f"MFU {100 * line['mfu']:.1f} %")
  return ", ".join(parts)
