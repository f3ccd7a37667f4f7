"""Bounds of the time of a training step; nothing is compiled.

Peaks of the chip, no efficiencies: a step takes at least as long as its slowest
resource, and at most as long as all of them one after another, were each at its
peak. What a compiler hides lies between.
"""

import dataclasses

from plan.chips import Topology
from plan.links import axis_rates, group_rate
from plan.memory import training
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
  def bound(self) -> str:
    """What takes longest."""
    times = {"compute": self.compute + self.waiting, "HBM": self.memory}
    times |= {" ".join(axes): s for axes, s in self.links.items()}
    return max(times, key=times.__getitem__)

  def mfu(self, seconds: float) -> float:
    """Model FLOPs utilisation of a step that takes so long."""
    return self.model_flops / self.peak / seconds

  def hfu(self, seconds: float) -> float:
    """The same with what is computed again."""
    return self.hardware_flops / self.peak / seconds


def step_time(config: PretrainConfig, machine: Topology) -> StepTime:
  """The bounds of a run's step.

  Args:
    config: the run.
    machine: where.

  Raises:
    ValueError: what the training loop would refuse, too.
  """
  from model.accounting import (
    flops_per_token,
    hardware_flops_per_token,
    layer_flops,
  )
  from plan import held
  from sharding import schedules
  from train.layout import imbalance
  from train.pipeline import make_stages

  model, step, data = config.model, config.step, config.data
  chip, N = machine.chip, machine.num_devices
  here = held.hold(config, N)
  mesh, layout = here.mesh, here.layout
  stages = make_stages(step.schedule, layout, mesh, step.accumulation)
  tokens = data.global_batch_size * data.seq_len / N
  a_token = hardware_flops_per_token(
    model, data.seq_len, step.remat, step.remat_every
  )
  layers, _ = layer_flops(model, data.seq_len)
  if stages is not None:
    extra = forward_again(step.remat, stages) - forward_again(step.remat, None)
    a_token += extra * sum(layers)
  peak = chip.flops["bfloat16"]
  compute = tokens * a_token / peak
  waiting = 0.0
  if stages is not None:
    costs = schedules.Costs(forward=1, backward=2, weight=1)
    idle = schedules.bubble(stages.schedule, costs)
    worst = imbalance(layout, model, data.seq_len)
    waiting = compute * (worst / (1 - idle) - 1)

  memory = training(config, N, chip.platform)
  parts = memory.parts
  state = parts["parameters"] + parts["optimizer state"]
  # Read and written by the update; gradients are added to and read; what is
  # kept of activations is written and read.
  moved = 2 * state + parts["gradients"] * (2 * step.accumulation + 1)
  moved += 2 * parts["activations"] * step.accumulation
  rates = axis_rates(machine, mesh.shape)
  sent = traffic(config, N, chip.platform).by_axes
  return StepTime(
    compute=compute,
    waiting=waiting,
    memory=moved / chip.hbm_bytes_per_second,
    links={axes: n / group_rate(rates, axes) for axes, n in sent.items()},
    model_flops=tokens * flops_per_token(model, data.seq_len),
    hardware_flops=tokens * a_token,
    tokens=tokens,
    peak=peak,
    checkpoint_bytes=held.whole_bytes(here),
    data_bytes=4 * data.global_batch_size * data.seq_len,
  )
