"""Whole runs whose replicas train apart: by flags, killed, begun again."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import cli
from data.loader import Loader
from tests.train import tiny_run
from train import pretrain, sft
from train.config import OptimizerConfig
from train.run_config import SFTConfig

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("train_local_sgd")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  tiny_run.write_data(folder)
  return folder


def config_of(folder, delay: int):
  """Meets after 5, 10 and 12 steps, and saves after 4, 8 and 12."""
  return cli.override(
    tiny_run.config(folder),
    {
      "num_steps": "12",
      "step.local.steps": "5",
      "step.local.delay": str(delay),
      "monitor.log_every": "1",
      "monitor.eval_every": "1",
    },
  )


@pytest.mark.parametrize("delay", [0, 1])
def test_a_killed_run_ends_as_if_it_had_not_been(
  folder, tmp_path, monkeypatch, delay
):
  config = config_of(folder, delay)
  whole = pretrain.run(config, tmp_path / "whole")
  iterate = Loader.iterate

  def fails_at(step):
    def spy(self, start_step=0):
      for found in iterate(self, start_step):
        # The training data, not the held-out.
        if self.num_batches is None and found[0] == step:
          raise KeyboardInterrupt
        yield found

    return spy

  # Between two meetings, and where one is due: both lose what was not saved.
  for step in (5, 10):
    monkeypatch.setattr(Loader, "iterate", fails_at(step))
    with pytest.raises(KeyboardInterrupt):
      pretrain.run(config, tmp_path / "killed")
  monkeypatch.setattr(Loader, "iterate", iterate)
  killed = pretrain.run(config, tmp_path / "killed")
  for a, b in zip(
    jax.tree.leaves(whole.state), jax.tree.leaves(killed.state), strict=True
  ):
    np.testing.assert_array_equal(a, b)

  # The held-out text is judged by the outer weights, which change only here.
  losses = [line["held_out_loss"] for line in whole.history]
  changed = [i + 1 for i in range(1, 12) if losses[i] != losses[i - 1]]
  assert changed == ([6, 11, 12] if delay else [5, 10, 12])
  assert losses[-1] < losses[0] - 0.1


def test_fine_tuning(folder, tmp_path):
  config = config_of(folder, 0)
  base = dataclasses.replace(config, num_steps=5)
  pretrain.run(base, tmp_path / "base")
  tuned = sft.run(
    SFTConfig(
      init_from=str(tmp_path / "base"),
      data=config.data,
      num_steps=4,
      mesh=config.mesh,
      step=config.step,
      optimizer=OptimizerConfig(),
      monitor=config.monitor,
    ),
    tmp_path / "sft",
  )
  # Its only round ended with the run: replicas stand at the outer weights.
  for outer, of_all in zip(
    jax.tree.leaves(tuned.state.model),
    jax.tree.leaves(tuned.state.replicas.model),
    strict=True,
  ):
    np.testing.assert_array_equal(of_all[0], outer)
    np.testing.assert_array_equal(of_all[1], outer)
