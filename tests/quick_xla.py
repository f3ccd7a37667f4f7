"""Settings of XLA for processes that compile much and run little.

Without them the suite takes three times as long. Buffers, collectives and the
operations of a program are planned before they count.
"""

import os

import jax


def use() -> None:
  """To be called before the first array is made; subprocesses inherit it."""
  flags = ["--xla_backend_optimization_level=0"]  # LLVM's optimiser.
  # Of what is left emitters of fusions take half, where they can be left out.
  if jax.__version_info__ < (0, 11):
    flags.append("--xla_cpu_use_fusion_emitters=false")
  # What the caller has set comes last, and wins.
  given = os.environ.get("XLA_FLAGS", "").split()
  flags = [flag for flag in flags if flag not in given]
  os.environ["XLA_FLAGS"] = " ".join([*flags, *given])


def with_threads() -> None:
  """The same, for programs with many collectives at once.

  A collective on a CPU holds a thread of XLA's until all devices have come,
  and a stage of a pipeline may wait in several at once.
  """
  use()
  os.environ["NPROC"] = "32"
