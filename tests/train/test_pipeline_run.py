"""`train.pretrain` on meshes with a pipeline, and its checkpoints on others."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from tests.tolerances import tolerance
from tests.train import tiny_run
from train import pretrain

PIPELINE = {
  "mesh.data": "1",
  "mesh.pipeline": "2",
  "step.accumulation": "2",
  "step.schedule": "interleaved",
  "step.virtual_stages": "2",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """Five layers, which no two stages share evenly; a checkpoint half way."""
  folder = tmp_path_factory.mktemp("data")
  tiny_run.write_data(folder)
  changes = {"model.num_layers": "5", "num_steps": "4"}
  changes |= {"checkpoint.every": "2", "monitor.eval_every": "2"}
  changes |= {"schedule.warmup_steps": "1"}
  # One device, its micro-batches one after the other.
  changes |= {"mesh.data": "1", "step.accumulation": "2"}
  return pretrain.cli.override(tiny_run.config(folder), changes)


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
  """The run on one device, and its folder."""
  folder = tmp_path_factory.mktemp("alone")
  return pretrain.run(config, str(folder)), folder


def values(result) -> dict:
  """What a run wrote down of its steps, but for times."""
  names = ("loss", "grad_norm", "param_norm", "held_out_loss")
  return {
    (line["step"], name): line[name]
    for line in result.history
    for name in names
    if name in line
  }


def same(ours, theirs):
  """Both runs end alike."""
  a, b = values(ours), values(theirs)
  assert a
  np.testing.assert_allclose(
    list(a.values()), [b[key] for key in a], **tolerance("mesh")
  )
  for x, y in zip(
    *(jax.tree.leaves(run.state.model) for run in (ours, theirs))
  ):
    assert x.shape == y.shape
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)


def test_runs_as_on_one_device(alone, config, tmp_path, capsys):
  """And its checkpoint goes on on one device, and back again."""
  piped = pretrain.cli.override(config, PIPELINE)
  first = pretrain.run(dataclasses.replace(piped, num_steps=2), str(tmp_path))
  printed = capsys.readouterr().out
  assert "Pipeline: layers" in printed and "largest over mean" in printed
  assert int(first.state.step) == 2
  # In order of the model, without empty places.
  assert first.state.model.layers.mlp.up.w.shape[0] == 5

  shutil.copytree(tmp_path, tmp_path / "other")
  same(pretrain.run(config, str(tmp_path / "other")), alone[0])

  shutil.copytree(alone[1], tmp_path / "back")
  shutil.rmtree(tmp_path / "back" / "checkpoints" / "4")
  same(pretrain.run(piped, str(tmp_path / "back")), alone[0])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"step.virtual_stages": "1"}, "'interleaved' and step.virtual_stages"),
    ({"step.virtual_stages": "3"}, "5 layers cannot .* 6 virtual stages"),
    ({"step.accumulation": "1"}, "step.accumulation .* mesh.pipeline=2, got 1"),
    ({"mesh.pipeline": "1"}, "step.virtual_stages=2 divides .* mesh.pipeline"),
    ({"mesh.pipeline": "16"}, "16 devices, but there are 8"),
  ],
)
def test_what_cannot_be_is_refused(config, tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    config = pretrain.cli.override(config, PIPELINE | change)
    pretrain.run(config, str(tmp_path))
