"""Every test runs on 8 CPU devices, with strict shapes and warnings as errors.

Sharding code is thus tested by the code that production runs, and a missing
axis or a deprecated call fails here first. (Warnings: see pyproject.toml.)
"""

import os

# Before JAX is imported, here and in the subprocesses that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# libtpu compiles for a TPU without one; it must not ask a cloud for its name.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Tests start processes that compile as well; a lock guards chips alone.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import hypothesis
import jax
import pytest

from tests import quick_xla

quick_xla.use()
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every run: a red test must be red again for the reader.
hypothesis.settings.register_profile(
  "repeatable", deadline=None, derandomize=True, database=None, max_examples=50
)
hypothesis.settings.load_profile("repeatable")


def pytest_itemcollected(item):
  """Sends all tests that load libtpu to one worker: it holds a lock file."""
  if item.get_closest_marker("tpu_compiler"):
    item.add_marker(pytest.mark.xdist_group("tpu_compiler"))
