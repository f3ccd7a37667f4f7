"""A planted race is found, whatever the version of JAX does about it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.call import pallas_call
from tests.pallas_kernels import races

X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)


def add_one(x, *, waits: bool):
  """x + 1, through a copy that is awaited before it is read, or after."""

  def kernel(x_ref, out_ref, buffer_ref, semaphore):
    copy = pltpu.make_async_copy(x_ref, buffer_ref, semaphore)
    copy.start()
    if waits:
      copy.wait()
    out_ref[...] = buffer_ref[...] + 1.0
    if not waits:
      copy.wait()

  return pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
    scratch_shapes=[
      pltpu.VMEM(x.shape, x.dtype),
      pltpu.SemaphoreType.DMA,
    ],
  )(x)


def test_a_copy_that_is_awaited_passes():
  result = races.check(lambda x: add_one(x, waits=True), X)
  np.testing.assert_array_equal(result, X + 1)


def test_a_read_before_the_wait_fails():
  with pytest.raises(races.RaceError, match="racy"):
    races.check(racy, X)


def racy(x):
  return add_one(x, waits=False)


def test_plain_interpretation_does_not_see_it():
  """Which is why the other mode is worth its time."""
  np.testing.assert_array_equal(racy(X), X + 1)


@pytest.mark.parametrize("jit", [False, True])
def test_a_function_that_ran_before_is_still_watched(jit):
  function = jax.jit(racy) if jit else racy
  function(X)
  with pytest.raises(races.RaceError):
    races.check(function, X)


def test_a_race_in_one_of_several_kernels_fails():
  """JAX keeps the finding of the last kernel only."""
  clean = lambda x: add_one(x, waits=True)
  with pytest.raises(races.RaceError):
    races.check(lambda x: clean(racy(x)), X)


def test_after_a_race_the_next_check_starts_afresh():
  with pytest.raises(races.RaceError):
    races.check(racy, X)
  races.check(lambda x: add_one(x, waits=True), X)


def test_a_function_without_a_kernel_proves_nothing():
  with pytest.raises(ValueError, match="runs a Pallas kernel"):
    races.check(jnp.sin, X)
