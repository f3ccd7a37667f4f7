"""SIGTERM: finish the step, save, and leave."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

# What a shell reports for a process that SIGTERM ended. A run that was
# stopped is not a run that is done, so a script must not take it for one.
EXIT_CODE = 128 + signal.SIGTERM


class Preempted(SystemExit):
  """The run was told to stop, and saved its state first."""

  def __init__(self, message: str):
    super().__init__(EXIT_CODE)
    self.message = message

  def __str__(self) -> str:
    return self.message


@contextlib.contextmanager
def catch_sigterm() -> Iterator[Callable[[int], bool]]:
  """While entered, SIGTERM only raises a flag.

  Yields:
    `stop(step)`, which tells whether to stop after this step. All processes
    agree on the step, as they must to save together.
  """
  import jax  # Not at the top: the launcher wants the code, and no JAX.

  if jax.process_count() > 1:  # jax.distributed has its own handler.
    from jax.experimental import multihost_utils

    yield multihost_utils.reached_preemption_sync_point
    return
  # Signals belong to the main thread; a run in another one (a notebook's
  # executor) is not asked to stop this way.
  caught = threading.Event()
  stop = lambda step: caught.is_set()
  if threading.current_thread() is not threading.main_thread():
    yield stop
    return
  before = signal.signal(signal.SIGTERM, lambda *_: caught.set())
  try:
    yield stop
  finally:
    signal.signal(signal.SIGTERM, before)
