"""What is said to fit does, by the same estimate, and nothing else is said."""

import pytest

from configs.typed import override
from model.families.llama import llama3_8b
from plan import memory, remedies
from plan.chips import parse
from tests.plan.test_memory import run_config
from tests.train import tiny

MACHINE = parse("v5e:2x4")
LIMIT = MACHINE.chip.hbm_bytes


def peak(config, remedy):
  settings = dict(line.split("=") for line in remedy.settings)
  run = override(config, settings)
  return memory.training(run, MACHINE.num_devices, MACHINE.chip.platform).peak


@pytest.fixture
def closed_form(monkeypatch):
  """Memory as a sum that is easily added up, in shares of a chip's."""

  def training(config, num_devices, platform):
    step = config.step
    if step.accumulation > 4:
      raise ValueError("rows that do not divide")
    whole = (
      (0.4 if step.offload.optimizer else 0.8)
      + {"none": 0.8, "dots": 0.6, "block": 0.4, "nested": 0.3}[step.remat]
      + 0.5 / step.accumulation
    )
    parts = {"all": round(LIMIT * whole)}
    return memory.Estimate(parts=parts, phases={"all": ("all",)})

  monkeypatch.setattr(memory, "training", training)


def run_of(**step):
  return run_config(tiny.GQA, rows=16, seq_len=32, fsdp=8, **step)


def test_single_changes_least_help_first(closed_form):
  """1.225 of a chip; with less recomputed or fewer rows it still is 1.1."""
  found = remedies.find(run_of(remat="nested", accumulation=4), MACHINE)
  assert [remedy.settings for remedy in found] == [
    ("step.offload.optimizer=true",)
  ]
  # 1.65 of a chip, of which so much is there that 1.45 fits.
  found = remedies.find(run_of(remat="dots", accumulation=2), MACHINE, 1 / 1.46)
  assert [remedy.settings for remedy in found] == [
    ("step.remat=block",),
    ("step.remat=nested",),
    ("step.offload.optimizer=true",),
  ]
  assert found[0].peak == pytest.approx(LIMIT * 1.45 / 1.46)


def test_several_changes_where_one_is_not_enough(closed_form):
  """2.1, then 1.6 and 1.2, then 0.825: each time the one that helps most."""
  (remedy,) = remedies.find(run_of(remat="none"), MACHINE)
  assert remedy == (
    (
      "step.remat=nested",
      "step.offload.optimizer=true",
      "step.accumulation=4",
    ),
    round(LIMIT * (0.4 + 0.3 + 0.125)),
  )


def test_what_no_setting_helps(closed_form):
  assert remedies.find(run_of(remat="none"), MACHINE, scale=2.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_a_run_fits_with_what_is_said(scale):
  config = run_config(
    llama3_8b(), rows=64, seq_len=4096, remat="none", precision="bf16", fsdp=8
  )
  found = remedies.find(config, MACHINE, scale)
  assert found
  for remedy in found:
    assert remedy.peak == scale * peak(config, remedy) <= LIMIT
