"""Bounds of the time of a training step; nothing is compiled.

Peaks of the chip, no efficiencies: a step takes at least as long as its slowest
resource, and at most as long as all of them one after another, were each at its
peak. What a compiler hides lies between.
"""

import dataclasses

from plan.chips import Topology
from plan.links import axis_rates, group_rate
from plan.memory import Estimate, training
from plan.traffic import forward_again, traffic
from train.run_config import PretrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
  """Seconds of one device in a step.

  Attributes:
    compute: of the matmuls, with what is computed again.
    waiting: of a pipeline's stages for each other.
    memory: to read and write what stands in HBM.
    links: mesh axes -> seconds of their collectives.
    model_flops: of a device in a step.
    hardware_flops: with what is computed again.
    tokens: of a device in a step.
    peak: FLOP/s of a device.
    checkpoint_bytes: of the whole state, once.
    data_bytes: of the whole batch as int32 tokens.
  """

  compute: float
  waiting: float
  memory: float
  links: dict[tuple[str, ...], float]
  model_flops: float
  hardware_flops: float
  tokens: float
  peak: float
  checkpoint_bytes: int
  data_bytes: int

  @property
  def hidden(self) -> float:
    """All communication beside other work, over links of their own."""
    work = max(self.compute, self.memory) + self.waiting
    return max([work, *self.links.values()])

  @property
  def exposed(self) -> float:
    """No communication beside other work."""
    work = max(self.compute, self.memory) + self.waiting
    return work + sum(self.links.values())

  @property
  def likely(self) -> float:
    """Communication beside other work where a compiler was seen to do so.

    Of what crosses `fsdp` alone nine tenths, of other axes a fifth (README,
    "Which mesh should I use?"): taken as all and nothing.
    """
    beside = sum(s for axes, s in self.links.items() if axes == ("fsdp",))
    work = max(self.compute, self.memory) + self.waiting
    return max(work, beside) + sum(self.links.values()) - beside

  @property
  def parts(self) -> dict[str, float]:
    """What may bound a step -> seconds."""
    times = {
      "compute": self.compute,
      "stages that wait": self.waiting,
      "HBM": self.memory,
    }
    return times | {" ".join(axes): s for axes, s in self.links.items()}

  @property
  def bound(self) -> str:
    """What takes longest."""
    return max(self.parts, key=self.parts.__getitem__)

  def worst_over(self, other: "StepTime") -> tuple[str, float]:
    """What takes longer here than in another step, most; and how long here."""
    parts, others = self.parts, other.parts
    over = lambda name: parts[name] - others.get(name, 0.0)
    name = max(parts, key=over)
    return name, parts[name]

  def mfu(self, seconds: float) -> float:
    """Model FLOPs utilisation of a step that takes so long."""
    return self.model_flops / self.peak / seconds

  def hfu(self, seconds: float) -> float:
    """The same with what is computed again."""
    return self.hardware_flops / self.peak / seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """What one device does in a step.

  Attributes:
    tokens: that it trains on.
    model_flops: of the model, forward and backward.
    hardware_flops: with what is computed again.
  """

  tokens: float
  model_flops: float
  hardware_flops: float


def work(config: PretrainConfig, num_devices: int) -> Work:
  """Counts the FLOPs of a step; see `model/accounting.py`.

  Args:
    config: the run.
    num_devices: of the machine.

  Raises:
    ValueError: what the training loop would refuse, too.
  """
  from model.accounting import (
    flops_per_token,
    hardware_flops_per_token,
    layer_flops,
  )
  from plan import held
  from train.pipeline import make_stages

  model, step, data = config.model, config.step, config.data
  here = held.hold(config, num_devices)
  stages = make_stages(step.schedule, here.layout, here.mesh, step.accumulation)
  tokens = data.global_batch_size * data.seq_len / num_devices
  a_token = hardware_flops_per_token(
    model, data.seq_len, step.remat, step.remat_every
  )
  if stages is not None:
    layers, _ = layer_flops(model, data.seq_len)
    extra = forward_again(step.remat, stages) - forward_again(step.remat, None)
    a_token += extra * sum(layers)
  return Work(
    tokens=tokens,
    model_flops=tokens * flops_per_token(model, data.seq_len),
    hardware_flops=tokens * a_token,
  )


def step_time(
  config: PretrainConfig, machine: Topology, planned: Estimate | None = None
) -> StepTime:
  """The bounds of a run's step.

  Args:
    config: the run.
    machine: where.
    planned: `plan.memory.training` of the same, where it is known.

  Raises:
    ValueError: what the training loop would refuse, too.
  """
  if planned is None:
    platform = machine.chip.platform
    planned = training(config, machine.num_devices, platform)
  parts, accumulation = planned.parts, config.step.accumulation
  # Read and written by the update; gradients are added to and read; what is
  # kept of activations is written and read.
  moved = 2 * (parts["parameters"] + parts["optimizer state"])
  moved += parts["gradients"] * (2 * accumulation + 1)
  moved += 2 * parts["activations"] * accumulation
  seconds = moved / machine.chip.hbm_bytes_per_second
  least = compute_and_links(config, machine)
  return dataclasses.replace(least, memory=seconds)


def compute_and_links(config: PretrainConfig, machine: Topology) -> StepTime:
  """The same as if HBM took no time: soon known, as no model is traced.

  Args:
    config: the run.
    machine: where.

  Raises:
    ValueError: what the training loop would refuse, too.
  """
  from plan import held
  from sharding import schedules
  from train.layout import imbalance
  from train.pipeline import make_stages

  model, step, data = config.model, config.step, config.data
  chip, N = machine.chip, machine.num_devices
  here = held.hold(config, N)
  mesh, layout = here.mesh, here.layout
  stages = make_stages(step.schedule, layout, mesh, step.accumulation)
  done = work(config, N)
  peak = chip.flops["bfloat16"]
  compute = done.hardware_flops / peak
  waiting = 0.0
  if stages is not None:
    costs = schedules.Costs(forward=1, backward=2, weight=1)
    idle = schedules.bubble(stages.schedule, costs)
    worst = imbalance(layout, model, data.seq_len)
    waiting = compute * (worst / (1 - idle) - 1)

  rates = axis_rates(machine, mesh.shape)
  sent = traffic(config, N, chip.platform).by_axes
  return StepTime(
    compute=compute,
    waiting=waiting,
    memory=0.0,
    links={axes: n / group_rate(rates, axes) for axes, n in sent.items()},
    model_flops=done.model_flops,
    hardware_flops=done.hardware_flops,
    tokens=done.tokens,
    peak=peak,
    checkpoint_bytes=held.whole_bytes(here),
    data_bytes=4 * data.global_batch_size * data.seq_len,
  )
