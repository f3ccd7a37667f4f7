"""What is said to fit does, by the same estimate, and nothing else is said."""

import pytest

from configs.typed import override
from model.families.llama import llama3_8b
from plan import remedies
from plan.chips import parse
from plan.memory import training
from tests.plan.test_memory import run_config


def peak(config, remedy, machine):
  settings = dict(line.split("=") for line in remedy.settings)
  run = override(config, settings)
  return training(run, machine.num_devices, machine.chip.platform).peak


def test_single_changes():
  """By an estimate that a compiler has found to be too low."""
  scale, machine = 1.25, parse("h100:8")
  config = run_config(
    llama3_8b(), rows=16, seq_len=8192, remat="none", precision="bf16", fsdp=8
  )
  found = remedies.find(config, machine, scale)
  assert {len(remedy.settings) for remedy in found} <= {1, 2}
  assert any("step.remat=block" in remedy.settings for remedy in found)
  for remedy in found:
    assert remedy.peak == scale * peak(config, remedy, machine)
    assert remedy.peak <= machine.chip.hbm_bytes
  assert sorted(found, key=lambda r: -r.peak) == found


def test_several_changes_where_one_is_not_enough():
  machine = parse("v5e:2x4")
  config = run_config(
    llama3_8b(), rows=64, seq_len=4096, remat="none", precision="bf16", fsdp=8
  )
  (remedy,) = remedies.find(config, machine)
  assert len(remedy.settings) > 1
  assert peak(config, remedy, machine) <= machine.chip.hbm_bytes


@pytest.mark.slow
def test_what_no_setting_helps():
  config = run_config(
    llama3_8b(), rows=1, seq_len=8192, remat="none", precision="bf16"
  )
  assert remedies.find(config, parse("v5e:1x1"), scale=8.0) == []
