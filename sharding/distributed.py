"""One run of several processes: how they find each other.

Imports no JAX at the top: runs' configs hold a `DistributedConfig`.
"""

import atexit
import dataclasses
import os
import sys

AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
  """The processes of a run, usually one a machine. Nothing set: one process.

  Attributes:
    coordinator: HOST:PORT of process 0, the same for all; "auto": TPU pods,
      Slurm and Open MPI tell each process who it is
      (`jax.distributed.initialize`).
    num_processes: all of them; not with "auto".
    process_id: this one, from 0 on; not with "auto".
    heartbeat_seconds: who is silent for so long is taken to be dead. Within
      twice that time no process of the run is left.
    watchdog: tell by a companion process who died, see `train/watchdog.py`.
      False where a parent does, as `train/launch.py`.
  """

  coordinator: str | None = None
  num_processes: int | None = None
  process_id: int | None = None
  heartbeat_seconds: int = 30
  watchdog: bool = True

  def __post_init__(self):
    numbers = (self.num_processes, self.process_id)
    if self.coordinator in (None, AUTO):
      if numbers != (None, None):
        raise ValueError(
          "distributed.num_processes and distributed.process_id need"
          " distributed.coordinator=HOST:PORT of process 0; got"
          f" coordinator={self.coordinator!r}"
        )
    elif None in numbers or not self.coordinator.rpartition(":")[2].isdecimal():
      raise ValueError(
        'distributed.coordinator must be HOST:PORT, or "auto"; HOST:PORT needs'
        f" num_processes and process_id as well; got {self}"
      )
    elif not 0 <= self.process_id < self.num_processes:
      raise ValueError(
        f"distributed.process_id={self.process_id} must be from 0 to"
        f" num_processes - 1 = {self.num_processes - 1}"
      )
    if self.heartbeat_seconds < 1:
      raise ValueError(
        "distributed.heartbeat_seconds must be at least 1, got"
        f" {self.heartbeat_seconds}"
      )


def join(config: DistributedConfig) -> bool:
  """Joins the other processes; before anything asks JAX for its devices.

  Returns:
    Whether there are others, and they were joined just now: a process that
    belongs to a run stays in it.
  """
  import jax

  if config.coordinator is None or jax.distributed.is_initialized():
    return False
  who = {}
  if config.coordinator != AUTO:
    who = {
      "coordinator_address": config.coordinator,
      "num_processes": config.num_processes,
      "process_id": config.process_id,
      "cluster_detection_method": "deactivate",
    }
  jax.distributed.initialize(
    **who,
    heartbeat_timeout_seconds=config.heartbeat_seconds,
    shutdown_timeout_seconds=config.heartbeat_seconds,
  )
  # Runs before JAX's own handler, which would wait for the others while they
  # wait for this process in a collective.
  atexit.register(_leave_at_once_after_an_error)
  return jax.process_count() > 1


def failed() -> bool:
  """Whether this process is ending by an error that nobody caught."""
  return getattr(sys, "last_value", None) is not None


def coordinator_host() -> str:
  """The host of process 0, as `join` was told or found out."""
  from jax._src import distributed  # There is no public name for it.

  address = distributed.global_state.coordinator_address
  return address.rpartition(":")[0].strip("[]")  # [::1]:80


def _leave_at_once_after_an_error() -> None:
  if failed():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
