"""Learning rates as functions of the step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from train.config import ScheduleConfig

Schedule = Callable[[jax.Array], jax.Array]


def make_schedule(config: ScheduleConfig, num_steps: int) -> Schedule:
  """Returns step (int32 scalar, from 0) -> learning rate (float32 scalar).

  With W warm-up steps of N: the rate of step s < W is peak * (s + 1) / W, so
  that no step is wasted on rate 0; from s = W on, with progress
  p = (s - W) / (N - W), it is the peak times

    constant  1
    linear    1 - (1 - final_ratio) p
    cosine    final_ratio + (1 - final_ratio) (1 + cos(pi p)) / 2
    wsd       1 - (1 - final_ratio) max(0, 1 - (N - s) / decay_steps)

  Steps past N keep the last value.

  Args:
    config: kind, peak and lengths.
    num_steps: N, all steps of the run.

  Raises:
    ValueError: the phases are longer than the run.
  """
  warmup = config.warmup_steps
  if warmup is None:
    warmup = round(config.warmup_fraction * num_steps)
  if warmup > num_steps:
    raise ValueError(
      f"schedule.warmup_steps={warmup} is more than the {num_steps} steps of"
      " the run"
    )
  decay = num_steps - warmup
  if config.kind == "wsd":
    wanted = round(config.decay_fraction * num_steps)
    if wanted > decay:
      raise ValueError(
        f"schedule: {warmup} steps of warm-up and {wanted} of decay are more"
        f" than the {num_steps} steps of the run; lower"
        " schedule.decay_fraction or the warm-up"
      )
    decay = wanted
  decay_start = num_steps - decay

  def schedule(step):
    step = jnp.asarray(step).astype(jnp.float32)
    progress = jnp.clip((step - decay_start) / max(decay, 1), 0.0, 1.0)
    match config.kind:
      case "constant":
        shape = jnp.ones_like(progress)
      case "linear" | "wsd":
        shape = 1.0 - progress
      case "cosine":
        shape = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    ratio = config.final_ratio + (1.0 - config.final_ratio) * shape
    warm = jnp.minimum((step + 1.0) / max(warmup, 1), 1.0)
    return config.peak * warm * ratio

  return schedule
