"""The rate that utilisation is measured against, and where it is from."""

import types

import jax
import jax.numpy as jnp
import pytest

from train import peak


def devices(kind, count, platform="tpu"):
  device = types.SimpleNamespace(device_kind=kind, platform=platform)
  return [device] * count


@pytest.mark.parametrize(
  ("kind", "teraflops"),
  [
    ("TPU v4", 275),
    ("TPU v5 lite", 197),
    ("TPU v5", 459),
    ("TPU v6 lite", 918),
    ("NVIDIA H100 80GB HBM3", 989),
    ("NVIDIA H100 PCIe", 756),
    ("NVIDIA A100-SXM4-80GB", 312),
    ("NVIDIA L4", 121),
    ("NVIDIA L40S", 362),
  ],
)
def test_known_kinds_by_their_longest_prefix(kind, teraflops):
  found = peak.peak(devices(kind, 4), operand_dtype="bfloat16")
  assert found.flops_per_second == 4 * teraflops * 1e12
  assert f"4 x {kind}" in found.source


def test_unknown_kinds_have_none():
  assert peak.peak(devices("TPU v99", 4), operand_dtype="bfloat16") is None


def test_a_cpu_is_measured_once_for_all_its_emulated_devices(monkeypatch):
  measured = []

  def rate(device, dtype):
    measured.append((device, jnp.dtype(dtype).name))
    return 5e9

  monkeypatch.setattr(peak, "measured_rate", rate)
  found = peak.peak(jax.devices("cpu"), operand_dtype="float32")
  assert len(jax.devices("cpu")) == 8
  assert found.flops_per_second == 5e9
  assert measured == [(jax.devices("cpu")[0], "float32")]
  assert "measured here" in found.source and "float32" in found.source


def test_the_measured_rate_is_that_of_a_timed_matmul():
  rate = peak.measured_rate(jax.devices()[0], "float32", size=512)
  assert 1e8 < rate < 1e14
