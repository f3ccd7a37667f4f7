"""What to change in a run that does not fit, tried by `plan/memory.py`."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from plan.chips import Topology
from train.run_config import PretrainConfig

_REMAT = ("none", "dots", "block", "nested")
_AT_MOST = 6  # changes at once


class Remedy(NamedTuple):
  """Settings to change together, and the bytes that a device then needs."""

  settings: tuple[str, ...]
  peak: float


def find(
  config: PretrainConfig, machine: Topology, scale: float = 1.0
) -> list[Remedy]:
  """Changes that make a run fit, by estimate.

  Args:
    config: a run that does not.
    machine: where.
    scale: by which estimates are multiplied: what a compiler says that the run
      needs, over the estimate for it.

  Returns:
    Each single change with which it fits, least help first: the cheaper ones
    usually help less. If there is none, the fewest found that do it together;
    if those do not, either, [].
  """
  limit = machine.chip.hbm_bytes
  tried = _try(config, machine, scale)
  alone = [(remedy, run) for remedy, run in tried if remedy.peak <= limit]
  if alone:
    return sorted((remedy for remedy, _ in alone), key=lambda r: -r.peak)
  settings, peak = (), math.inf
  for _ in range(_AT_MOST):
    if not tried:
      return []
    best, config = min(tried, key=lambda pair: pair[0].peak)
    if best.peak >= peak:
      return []
    settings, peak = (*settings, *best.settings), best.peak
    if peak <= limit:
      return [Remedy(_last(settings), peak)]
    tried = _try(config, machine, scale)
  return []


def _last(settings: tuple[str, ...]) -> tuple[str, ...]:
  """The last value of each setting."""
  values = dict(setting.split("=") for setting in settings)
  return tuple(f"{name}={value}" for name, value in values.items())


def _try(
  config: PretrainConfig, machine: Topology, scale: float
) -> list[tuple[Remedy, PretrainConfig]]:
  """All single changes that the training loop takes."""
  from plan.memory import training

  found = []
  for settings in _changes(config, machine.num_devices):
    try:
      run = _with(config, settings)
      needed = training(run, machine.num_devices, machine.chip.platform)
    except ValueError:
      continue  # rows that do not divide, or settings that exclude each other
    lines = tuple(
      f"{name}={str(value).lower()}" for name, value in settings.items()
    )
    found.append((Remedy(lines, scale * needed.peak), run))
  return found


def _with(config: Any, settings: Mapping[str, Any]) -> Any:
  """A dataclass with other values at dotted names, all of them at once."""
  fields: dict[str, dict] = {}
  for name, value in settings.items():
    first, _, rest = name.partition(".")
    fields.setdefault(first, {})[rest] = value
  values = {
    first: inner[""] if "" in inner else _with(getattr(config, first), inner)
    for first, inner in fields.items()
  }
  return dataclasses.replace(config, **values)


def _changes(
  config: PretrainConfig, num_devices: int
) -> Iterator[dict[str, Any]]:
  """Settings, each of which makes something smaller."""
  from plan.held import abstract_mesh

  step, offload = config.step, config.step.offload
  for remat in _REMAT[_REMAT.index(step.remat) + 1 :]:
    yield {"step.remat": remat}
  for factor in (2, 4, 8):
    yield {"step.accumulation": factor * step.accumulation}
  yield {"step.loss_chunk": step.loss_chunk // 2}
  if step.zero_stage < 3:
    yield {"step.zero_stage": 3}
  if not config.optimizer.master_weights:
    yield {"optimizer.master_weights": True}
  for field in dataclasses.fields(offload):
    if getattr(offload, field.name) is False:
      yield {f"step.offload.{field.name}": True}
  sizes = abstract_mesh(config.mesh, num_devices).shape
  for source, target in (("data", "fsdp"), ("fsdp", "tensor")):
    if sizes[source] % 2 == 0:
      yield {
        f"mesh.{source}": sizes[source] // 2,
        f"mesh.{target}": sizes[target] * 2,
      }
