"""Runs kernels in TPU interpret mode and fails where two accesses race.

That mode is some 50 times slower than `interpret=True`, which runs every copy
at once and so cannot see a missing wait. It is for kernels that start copies
or touch semaphores themselves.
"""

import dataclasses
from unittest import mock

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


class RaceError(AssertionError):
  """A kernel reads or writes what another copy may be writing."""


def check(function, *args):
  """Calls `function` with every Pallas kernel in it watched.

  Args:
    function: of arrays. Its kernels must be traced by the call, not before.
    *args: its arguments.

  Returns:
    What it returns, computed.

  Raises:
    RaceError: accesses of a kernel race; the details are on stdout.
    ValueError: no kernel ran, so that nothing has been shown.
  """
  params = pltpu.InterpretParams(detect_races=True)
  # JAX 0.12 raises inside the callback, which ends in a page of traces, and
  # 0.10 only prints. Both keep the finding, kernel by kernel.
  if "on_race" in {field.name for field in dataclasses.fields(params)}:
    params = dataclasses.replace(params, on_race="warn")
  make_state = interpret_pallas_call.RaceDetectionState
  states = []

  def remember(*args, **kwargs):
    states.append(make_state(*args, **kwargs))
    return states[-1]

  with (
    mock.patch.object(interpret_pallas_call, "RaceDetectionState", remember),
    pltpu.force_tpu_interpret_mode(params),
  ):
    # A cached trace might hold the kernel as it is otherwise interpreted.
    result = jax.block_until_ready(
      jax.jit(lambda *args: function(*args))(*args)
    )
  if not states:
    raise ValueError("wanted a function that runs a Pallas kernel, got none")
  if any(state.races_found for state in states):
    raise RaceError(f"{getattr(function, '__name__', function)} has a race")
  return result
