"""Settings of XLA for processes that compile much and run little."""

import os

import jax


def use() -> None:
  """To be called before the first array is made.

  None of it changes a collective, nor which operations there are.
  """
  # LLVM's optimiser would take half of the time.
  flags = ["--xla_backend_optimization_level=0"]
  # Of what is left emitters of fusions take half, where they can be left out.
  if jax.__version_info__ < (0, 11):
    flags.append("--xla_cpu_use_fusion_emitters=false")
  os.environ["XLA_FLAGS"] = " ".join(flags)
  # A collective on a CPU holds a thread of XLA's until all devices have come,
  # and a stage of a pipeline may wait in several at once.
  os.environ["NPROC"] = "32"
