"""Settings of a run of several processes; the processes: tests/train."""

import sys

import pytest

from sharding import distributed
from sharding.distributed import DistributedConfig

GIVEN = {"coordinator": "host0:1234", "num_processes": 4, "process_id": 3}


@pytest.mark.parametrize(
  "settings",
  [{}, {"coordinator": "auto"}, GIVEN, GIVEN | {"coordinator": "[::1]:80"}],
)
def test_what_is_complete(settings):
  config = DistributedConfig(**settings)
  assert config.heartbeat_seconds == 30


@pytest.mark.parametrize(
  ("settings", "want"),
  [
    ({"num_processes": 4}, "need distributed.coordinator=HOST:PORT"),
    (GIVEN | {"coordinator": "auto"}, "need distributed.coordinator=HOST:PORT"),
    (GIVEN | {"coordinator": "host0"}, "must be HOST:PORT"),
    (GIVEN | {"process_id": None}, "needs num_processes and process_id"),
    (GIVEN | {"process_id": 4}, "from 0 to num_processes - 1 = 3"),
    ({"heartbeat_seconds": 0}, "at least 1, got 0"),
  ],
)
def test_what_is_refused(settings, want):
  with pytest.raises(ValueError, match=want):
    DistributedConfig(**settings)


@pytest.mark.parametrize(
  ("settings", "want"),
  [
    (
      GIVEN,
      {
        "coordinator_address": "host0:1234",
        "num_processes": 4,
        "process_id": 3,
        "cluster_detection_method": "deactivate",
      },
    ),
    ({"coordinator": "auto"}, {}),  # JAX asks the machines.
  ],
)
def test_what_jax_is_told(settings, want, monkeypatch):
  told = []
  monkeypatch.setattr("jax.distributed.is_initialized", lambda: bool(told))
  monkeypatch.setattr("jax.distributed.initialize", lambda **k: told.append(k))
  monkeypatch.setattr("jax.process_count", lambda: 4)
  monkeypatch.setattr(distributed.atexit, "register", lambda _: None)
  config = DistributedConfig(heartbeat_seconds=7, **settings)
  assert distributed.join(config)
  timeouts = {"heartbeat_timeout_seconds": 7, "shutdown_timeout_seconds": 7}
  assert told == [want | timeouts]
  assert not distributed.join(config)  # Joined before.
  assert len(told) == 1


def test_a_single_process_joins_nobody(monkeypatch):
  monkeypatch.setattr("jax.distributed.initialize", None)
  assert not distributed.join(DistributedConfig())


def test_a_failed_process_is_known_by_its_error(monkeypatch):
  monkeypatch.delattr(sys, "last_value", raising=False)
  assert not distributed.failed()
  monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
  assert distributed.failed()
