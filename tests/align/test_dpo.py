"""The DPO main: starts at the reference, learns, resumes, on any mesh."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest

from align import dpo
from sharding.axes import MeshConfig
from tests.align import tiny
from tests.tolerances import tolerance
from tests.train import hosts_run
from train import monitor
from train.config import OptimizerConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("dpo")


@pytest.fixture(scope="module")
def run(folder):
  """Six steps, as most tests compare with."""
  return dpo.run(tiny.config(folder), folder / "run", model=tiny.model())


def losses(result):
  return [line["loss"] for line in result.history]


def test_starts_at_the_reference(run):
  first = run.history[0]
  np.testing.assert_allclose(first["loss"], np.log(2), rtol=1e-5)
  assert abs(first["reward_margin"]) < 1e-5 and abs(first["kl"]) < 1e-4
  assert first["grad_norm"] > 0


def test_learns_the_preference(run):
  last = run.history[-1]
  assert last["step"] == 6 and last["loss"] < 0.5 * np.log(2)
  assert last["preference_accuracy"] > 0.9
  assert last["held_out_loss"] < run.history[2]["held_out_loss"] < np.log(2)
  assert last["held_out_preference_accuracy"] > 0.9
  assert last["held_out_loss"] < 0.6
  assert last["reward_chosen"] > last["reward_rejected"]
  margin = last["reward_chosen"] - last["reward_rejected"]
  np.testing.assert_allclose(last["reward_margin"], margin, rtol=1e-4)


def test_the_model_given_stays_valid(folder, run):
  del run
  model = tiny.model()
  before = jax.device_get(jax.tree.leaves(model))
  config = tiny.config(folder, num_steps=1, reference="live")
  dpo.run(config, folder / "valid", model=model)
  after = jax.device_get(jax.tree.leaves(model))
  for a, b in zip(before, after, strict=True):
    np.testing.assert_array_equal(a, b)


def test_live_reference_and_another_mesh_change_nothing(folder, run):
  config = tiny.config(
    folder, reference="live", mesh=MeshConfig(fsdp=2, tensor=2)
  )
  step = dataclasses.replace(config.step, accumulation=2)
  result = dpo.run(
    dataclasses.replace(config, step=step), folder / "live", model=tiny.model()
  )
  np.testing.assert_allclose(
    losses(result), losses(run), **tolerance("gradient")
  )
  np.testing.assert_allclose(
    result.history[2]["held_out_loss"],
    run.history[2]["held_out_loss"],
    **tolerance("gradient"),
  )


def test_resumes_bitwise(folder, run):
  config = tiny.config(folder, num_steps=3)
  dpo.run(config, folder / "resumed", model=tiny.model())
  config = dataclasses.replace(config, num_steps=6)
  result = dpo.run(config, folder / "resumed", model=tiny.model())
  assert losses(result) == losses(run)
  for a, b in zip(
    jax.tree.leaves(result.state.model),
    jax.tree.leaves(run.state.model),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["precomputed", "live"])
def test_two_processes(folder, run, reference, tmp_path):
  """As one, from the weights of a run."""
  del run
  config = tiny.config(
    folder,
    init_from=str(folder / "run"),
    reference=reference,
    mesh=MeshConfig(data=2, fsdp=2),
    optimizer=OptimizerConfig(eps=1e-4),
  )
  command = hosts_run.command_of("align.dpo", config, tmp_path / "two")
  hosts_run.launch(command, num_processes=2)
  one = dpo.run(config, str(tmp_path / "one"))
  lines = monitor.read(tmp_path / "two" / "metrics.jsonl")
  rtol = tolerance("mesh")["rtol"]
  for line, other in zip(lines, one.history, strict=True):
    for name in ("loss", "held_out_loss"):
      if name in other:
        np.testing.assert_allclose(line[name], other[name], rtol=rtol)


@pytest.mark.parametrize(
  ("data", "message"),
  [
    ({"seq_len": 49}, "max_positions=48"),
    ({"global_batch_size": 3}, "multiple of"),
    ({"path": "nowhere.jsonl"}, r"nowhere\.jsonl"),
  ],
)
def test_refuses(folder, data, message):
  config = tiny.config(folder)
  data = dataclasses.replace(config.data, **data)
  with pytest.raises(ValueError, match=message):
    dpo.run(
      dataclasses.replace(config, data=data),
      folder / "refused",
      model=tiny.model(),
    )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"beta": 0.0}, "beta must be positive"),
    ({"label_smoothing": 0.5}, r"\[0, 0.5\)"),
    ({"num_epochs": 0}, "num_epochs"),
  ],
)
def test_config_refuses(folder, changes, message):
  with pytest.raises(ValueError, match=message):
    tiny.config(folder, **changes)


def test_config_imports_no_jax():
  code = "import align.config, align.dpo, sys; assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)
