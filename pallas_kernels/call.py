"""`pallas_call` for a TPU that also runs, slowly, everywhere else."""

import jax
from jax.experimental import pallas as pl


def pallas_call(kernel, **settings):
  """The same as `pl.pallas_call`, interpreted where there is no TPU.

  Chosen when the program is lowered, by the platform it is lowered for, not
  by that of the process: a laptop may compile for a TPU.

  Args:
    kernel: the body.
    **settings: of `pl.pallas_call`.

  Returns:
    A function of the kernel's inputs.
  """
  compiled = pl.pallas_call(kernel, **settings)
  interpreted = pl.pallas_call(kernel, **settings, interpret=True)
  return lambda *inputs: jax.lax.platform_dependent(
    *inputs, tpu=compiled, default=interpreted
  )
