"""Ways to run one step on one machine, and what each would cost.

A way is a mesh, a ZeRO stage, micro-batches, a pipeline's schedule, and what is
computed again; figures are those of `plan.memory` and `plan.step_time`, nothing
is compiled.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import tqdm
from flax import nnx

from model.execution import Remat
from model.transformer import Transformer
from plan import meshes
from plan.chips import Topology
from plan.memory import BETWEEN_STEPS, GIB, Estimate, training
from plan.step_time import StepTime, compute_and_links, step_time
from sharding.axes import MESH_AXES, MeshConfig
from train.run_config import PretrainConfig

_REMATS: tuple[Remat, ...] = ("none", "dots", "block", "nested")
# Part of a chip's memory for what `plan.memory` does not count: it was up to
# 9.2 % below the compiler on Llama's layers (docs/log.md). On a small model it
# was further below: there the compiler must judge.
_MARGIN = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """One way to run.

  Attributes:
    config: the run, with what was chosen.
    memory: of a device; None: not asked.
    time: of a step; without `memory` a lower bound of it, which was enough to
      lose. None: the loop would refuse the run.
    refused: why.
  """

  config: PretrainConfig
  memory: Estimate | None = None
  time: StepTime | None = None
  refused: str | None = None

  @property
  def fits(self) -> bool:
    """Whether it can be run."""
    return self.time is not None and self.memory is not None

  @property
  def rank(self) -> tuple:
    """Fast ones first; then what was not worth a look; then what cannot be."""
    if self.time is None:
      return 2, 0 if self.memory is None else -1 / self.memory.peak
    return int(self.memory is None), self.time.likely

  @property
  def name(self) -> str:
    """What was chosen, in a line."""
    mesh, step = self.config.mesh, self.config.step
    words = [sizes(mesh)]
    if mesh.fsdp > 1:
      words.append(f"zero {step.zero_stage}")
    if mesh.pipeline > 1:
      words.append(step.schedule)
    words.append(f"remat {step.remat}")
    if step.accumulation > 1:
      words.append(f"accumulation {step.accumulation}")
    return ", ".join(words)

  def why(self, best: "Candidate", machine: Topology) -> str:
    """What it is bound by, with the number that decides."""
    if self.time is None and self.memory is not None:
      parts = self.memory.parts
      phase = self.memory.phases[self.memory.peak_phase]
      worst = max(phase, key=lambda name: parts.get(name, 0))
      return (
        f"memory: {self.memory.peak / GIB:.1f} of"
        f" {machine.chip.hbm_bytes / GIB:.1f} GiB even with remat"
        f" {self.config.step.remat}; {worst} {parts[worst] / GIB:.1f}"
      )
    if self.time is None:
      return str(self.refused)
    if self is best:
      name = self.time.bound
      return f"{_label(name)}: {self.time.parts[name]:.3f} s a step"
    assert best.time is not None
    name, seconds = self.time.worst_over(best.time)
    other = best.time.parts.get(name, 0.0)
    least = "" if self.fits else "at least "
    return (
      f"{_label(name)}: {seconds:.3f} s a step where the best has {other:.3f};"
      f" {least}{self.time.likely / best.time.likely - 1:+.0%} in all"
    )


def _label(name: str) -> str:
  """What bounds a step, for the reader."""
  links = set(name.split()) <= set(MESH_AXES)
  return f"links of {name}" if links else name


def sizes(mesh: MeshConfig) -> str:
  """The axes of a mesh that are more than 1."""
  found = dataclasses.asdict(mesh)
  text = " ".join(f"{axis} {n}" for axis, n in found.items() if n > 1)
  return text or "one device"


def best_of_each(
  config: PretrainConfig,
  machine: Topology,
  *,
  keep: int = 1,
  progress: bool = False,
) -> list[Candidate]:
  """The best way to use each mesh, fastest first.

  Branch and bound: meshes are tried in the order of what their compute and
  links need at least, and only as long as that is less than the best step.

  Args:
    config: the run; its mesh and what is searched of its step are not read.
    machine: the devices.
    keep: meshes that are wanted; the others need not be tried.
    progress: whether to show a bar.

  Raises:
    ValueError: the run can be on no mesh.
  """
  model = jax.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
  experts = config.model.moe is not None
  every = list(meshes.every(machine.num_devices, experts=experts))
  bar = lambda items, what: tqdm.tqdm(
    items, what, disable=not progress, leave=False
  )
  bounds = [
    _bounds(config, model, machine, mesh) for mesh in bar(every, "bounds")
  ]
  found, best = [], [math.inf] * keep
  bounds.sort(key=lambda ways: ways[0].rank)
  for ways in bar(bounds, "memory"):
    chosen = _fitting(ways, machine, best[-1])
    if chosen.fits:
      best = sorted([*best, chosen.time.likely])[:keep]
    found.append(chosen)
  if all(way.refused is not None for way in found):
    reasons = sorted({str(way.refused) for way in found})
    raise ValueError(
      f"no mesh of {machine.num_devices} devices can run this: "
      + "; ".join(reasons[:3])
    )
  return sorted(found, key=lambda way: way.rank)


def _bounds(
  config: PretrainConfig,
  model: Transformer,
  machine: Topology,
  mesh: MeshConfig,
) -> list[Candidate]:
  """Ways on a mesh, by what each needs at least; or one that is refused."""
  ways, refused = [], None
  for choice in _choices(config, mesh):
    try:
      run = _chosen(config, mesh, choice)
      meshes.check(run, model, machine.num_devices)
      time = compute_and_links(run, machine)
    except ValueError as error:
      there = dataclasses.replace(config, mesh=mesh)
      refused = refused or Candidate(config=there, refused=str(error))
    else:
      ways.append(Candidate(config=run, time=time))
  if not ways:
    assert refused is not None
    return [refused]
  return sorted(ways, key=lambda way: way.rank)


def _fitting(
  ways: list[Candidate], machine: Topology, best: float
) -> Candidate:
  """The best of a mesh's ways that fits; else what comes nearest to it."""
  first = ways[0]
  if first.refused is not None or first.time.likely >= best:
    return first
  chip, fitting = machine.chip, None
  plan = lambda way: training(way.config, machine.num_devices, chip.platform)
  thrifty = {}
  for way in sorted(ways, key=_thrift):
    step = way.config.step
    thrifty[step.schedule, step.accumulation] = way
  smallest = [
    dataclasses.replace(way, memory=plan(way), time=None)
    for way in thrifty.values()
  ]
  nearest = min(smallest, key=lambda way: way.memory.peak)
  if all(_always(way.memory) > _room(machine) for way in smallest):
    return nearest
  for way in ways:
    if way.time.likely >= best:
      break
    planned = plan(way)
    if planned.peak <= _room(machine):
      time = step_time(way.config, machine, planned)
      way = dataclasses.replace(way, memory=planned, time=time)
      if fitting is None or way.rank < fitting.rank:
        fitting = way
        best = min(best, time.likely)
  return fitting or next(
    (way for way in ways if way.time.likely >= best), nearest
  )


def _thrift(way: Candidate) -> tuple[int, int]:
  """Grows with what saves memory, other things being equal."""
  step = way.config.step
  return step.zero_stage, _REMATS.index(step.remat)


def _always(planned: Estimate) -> int:
  """Bytes that no micro-batch and no recomputation would change."""
  return sum(planned.parts.get(part, 0) for part in BETWEEN_STEPS)


def _room(machine: Topology) -> float:
  return (1 - _MARGIN) * machine.chip.hbm_bytes


def _choices(config: PretrainConfig, mesh: MeshConfig) -> Iterator[dict]:
  """Yields fields of `StepConfig` to try; the last ones need least memory."""
  replicas = math.prod(getattr(mesh, axis) for axis in config.rules.batch)
  rows = max(config.data.global_batch_size // replicas, 1)
  schedules = [("1f1b", 1)]
  if mesh.pipeline > 1:
    chunks = max(config.step.virtual_stages, 2)
    schedules = [("zero_bubble", 1), ("interleaved", chunks), ("1f1b", 1)]
  for zero in (1, 2, 3) if mesh.fsdp > 1 else (3,):
    for schedule, virtual_stages in schedules:
      for accumulation in (n for n in range(1, rows + 1) if rows % n == 0):
        for remat in _REMATS:
          yield {
            "zero_stage": zero,
            "schedule": schedule,
            "virtual_stages": virtual_stages,
            "accumulation": accumulation,
            "remat": remat,
          }


def _chosen(
  config: PretrainConfig, mesh: MeshConfig, choice: dict
) -> PretrainConfig:
  """The run on a mesh.

  Raises:
    ValueError: settings that exclude each other.
  """
  rules = config.rules
  if mesh.context > 1 and rules.embed == ("fsdp",):
    # Whoever shares a sequence shares the weights as well.
    rules = dataclasses.replace(rules, embed=("fsdp", "context"))
  step = dataclasses.replace(config.step, **choice)
  return dataclasses.replace(config, mesh=mesh, rules=rules, step=step)


def fits_somehow(config: PretrainConfig, machine: Topology) -> bool:
  """Whether some mesh has room for a run at its smallest micro-batch."""
  model = jax.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
  experts = config.model.moe is not None
  every = meshes.every(machine.num_devices, experts=experts)
  # Where most is split comes first.
  for mesh in sorted(every, key=lambda mesh: -mesh.fsdp * mesh.tensor):
    for choice in reversed([*_choices(config, mesh)]):
      try:
        smallest = _chosen(config, mesh, choice)
        meshes.check(smallest, model, machine.num_devices)
      except ValueError:
        continue
      planned = training(smallest, machine.num_devices, machine.chip.platform)
      if planned.peak <= _room(machine):
        return True
      break
  return False
