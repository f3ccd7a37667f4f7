"""Preference losses against TRL, run now, and against what was recorded."""

import json

import numpy as np
import pytest

from tests.oracles import record_preferences

pytestmark = [
  pytest.mark.oracle,
  pytest.mark.filterwarnings("default"),  # of torch and TRL, about themselves
]

pytest.importorskip("torch")
pytest.importorskip("trl")


def test_recorded_values_are_trls():
  recorded = json.loads(record_preferences.PATH.read_text())
  live = record_preferences.compute()
  assert live.keys() == recorded.keys()
  for case in live.keys() - {"trl"}:
    for name, values in live[case].items():
      np.testing.assert_allclose(
        recorded[case][name], values, rtol=1e-5, atol=1e-7
      )
