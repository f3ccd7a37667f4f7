"""Settings of XLA for processes that compile much and run little.

Buffers, collectives and the operations of a program are planned before they
count.
"""

import os

import jax


def use() -> None:
  """To be called before the first array is made; subprocesses inherit it."""
  _add("--xla_backend_optimization_level=0")  # LLVM's optimiser: a third.


def use_where_no_tpu_compiles() -> None:
  """The same for many programs with many collectives each."""
  use()
  # Of what is left emitters of fusions take half, where they can be left out;
  # a libtpu that does not know the flag aborts.
  if jax.__version_info__ < (0, 11):
    _add("--xla_cpu_use_fusion_emitters=false")
  # A collective on a CPU holds a thread of XLA's until all devices have come,
  # and a stage of a pipeline may wait in several at once.
  os.environ["NPROC"] = "32"


def _add(flag: str) -> None:
  """What the caller has set comes last, and wins."""
  given = os.environ.get("XLA_FLAGS", "")
  if flag not in given.split():
    os.environ["XLA_FLAGS"] = f"{flag} {given}".strip()
