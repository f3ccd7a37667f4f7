"""Whole runs of `train.pretrain`, in this process: what the engine promises."""

import dataclasses
import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from data import tokenized
from data.loader import Loader
from tests.tolerances import tolerance
from tests.train import tiny_run
from train import checkpoint, guard, monitor, preemption, pretrain, program

# One worker: the runs that the tests share are not run twice.
pytestmark = pytest.mark.xdist_group("train_loop")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  tiny_run.write_data(folder)
  return folder


@pytest.fixture(scope="module")
def config(folder):
  """Ten steps, with checkpoints after 4, 8 and 10."""
  return dataclasses.replace(tiny_run.config(folder), num_steps=10)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
  """A run that nothing disturbed: its result and its folder."""
  workdir = tmp_path_factory.mktemp("whole")
  return pretrain.run(config, str(workdir)), workdir


def bits(tree) -> list[bytes]:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def losses(history) -> dict[int, float]:
  return {line["step"]: line["loss"] for line in history}


def at_batch(monkeypatch, number: int, act):
  """Calls `act(batch)`, which may change it, before step `number` (from 1)."""
  iterate = Loader.iterate

  def changed(self, start_step=0):
    for index, batch, ids in iterate(self, start_step):
      if self.num_batches is None and index == number - 1:
        act(batch)
      yield index, batch, ids

  monkeypatch.setattr(Loader, "iterate", changed)


def test_the_run_folder(whole, config):
  result, workdir = whole
  assert monitor.read(workdir / "metrics.jsonl") == result.history
  assert [line["step"] for line in result.history] == [1, 3, 4, 6, 8, 9, 10]
  line = result.history[-1]
  wanted = """step loss ppl grad_norm param_norm learning_rate tokens
    tokens_per_second mfu mfu_full hfu step_seconds held_out_loss held_out_ppl
    held_out_bits_per_byte"""
  assert set(wanted.split()) <= set(line)
  assert 0 < line["mfu"] < line["mfu_full"]
  assert line["mfu"] < line["hfu"]
  assert checkpoint.steps(workdir / "checkpoints") == [8, 10]
  assert json.loads((workdir / "config.json").read_text())["num_steps"] == 10
  manifest = checkpoint.verify(workdir / "checkpoints", 10)
  assert manifest["config"] == json.loads(
    json.dumps(dataclasses.asdict(config))
  )
  assert manifest["data"].keys() == {"epoch", "row"}
  assert bits(result.state.step) == bits(np.int32(10))
  assert "Held-out bits per byte" in (workdir / "report.html").read_text()


def test_it_learns(whole):
  found = losses(whole[0].history)
  assert found[10] < found[1] - 1.0


def test_overfits_two_batches(config, folder, tmp_path):
  store = tokenized.TokenStore(folder / "train")
  bounds = [store.offsets[i : i + 2] for i in range(0, 72, 9)]
  tokenized.write(
    tmp_path / "eight",
    [
      tokenized.Example(f"{i}", store.tokens[start:stop].tolist())
      for i, (start, stop) in enumerate(bounds)
    ],
    vocab_size=store.vocab_size,
    fingerprint=store.fingerprint,
  )
  settings = {
    "data.sources.0.path": str(tmp_path / "eight"),
    "data.packing": "none",  # One document a row, four rows a batch.
    "model.residual_dropout": "0.0",
    "held_out.path": "none",
    "num_steps": "80",
    "checkpoint.every": "80",
  }
  result = pretrain.run(
    pretrain.cli.override(config, settings), str(tmp_path / "run")
  )
  found = losses(result.history)
  # The eight documents begin alike: what is left is which of them it is.
  assert found[1] > 5.0
  assert min(found[78], found[80]) < 0.35


def test_a_finished_run_is_not_trained_again(whole, config):
  result, workdir = whole
  again = pretrain.run(config, str(workdir))
  assert bits(again.state) == bits(result.state)
  assert again.history == result.history


def test_sigterm_saves_and_the_run_goes_on_bitwise(
  whole, config, tmp_path, monkeypatch, capsys
):
  with monkeypatch.context() as patch:
    at_batch(patch, 6, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(preemption.Preempted) as error:
      pretrain.run(config, str(tmp_path))
  assert isinstance(error.value, SystemExit) and error.value.code == 143
  assert f"after step 6, saved as {tmp_path}" in capsys.readouterr().err
  assert checkpoint.steps(tmp_path / "checkpoints") == [4, 6]
  assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

  result = pretrain.run(config, str(tmp_path))
  assert bits(result.state) == bits(whole[0].state)
  # Step 6 was saved, so it has a line; all others are those of the whole run.
  found = losses(result.history)
  assert found.keys() == {1, 3, 4, 6, 8, 9, 10}
  assert found == losses(whole[0].history)
  assert result.history[-1]["tokens"] == whole[0].history[-1]["tokens"]


def test_a_nan_in_a_batch_stops_and_names_it(
  whole, config, tmp_path, monkeypatch
):
  def poison(batch):
    batch["loss_weights"][1, 0] = np.nan

  with monkeypatch.context() as patch:
    at_batch(patch, 8, poison)  # A step whose state would be saved.
    with pytest.raises(guard.NonFiniteError) as error:
      pretrain.run(config, str(tmp_path))
  text = str(error.value)
  assert text.startswith("Step 8: loss is nan, grad_norm is nan")
  report = json.loads((tmp_path / "nonfinite.json").read_text())
  assert report["step"] == 8
  named = [name for row in report["document_ids"] for name in row]
  assert len(named) > 4 and all(name.startswith("train-") for name in named)
  assert named[0] in text
  assert f"{tmp_path / 'checkpoints' / '4'};" in text
  assert checkpoint.steps(tmp_path / "checkpoints") == [4]
  # The last good one is good: from it the run ends as it should.
  result = pretrain.run(config, str(tmp_path))
  assert bits(result.state) == bits(whole[0].state)


def test_a_nan_in_a_weight_stops_the_run(config, tmp_path, monkeypatch):
  make = program.make_train_step

  def poisoned(*args, **kwargs):
    train_step = make(*args, **kwargs)

    def spoil(leaves, batch):
      state = train_step.tree.unflatten(leaves)
      if int(state.step) == 5:
        scale = state.model.final_norm.scale
        scale[...] = scale[...].at[0].set(jax.numpy.inf)
      return train_step.on_leaves(jax.tree.leaves(state), batch)

    return dataclasses.replace(train_step, on_leaves=spoil)

  monkeypatch.setattr(program, "make_train_step", poisoned)
  with pytest.raises(guard.NonFiniteError, match=r"Step 6: .*checkpoints/4;"):
    pretrain.run(config, str(tmp_path))
  assert checkpoint.steps(tmp_path / "checkpoints") == [4]


def test_one_compilation(config, tmp_path, monkeypatch):
  made = []
  make = program.make_train_step

  def kept(*args, **kwargs):
    made.append(make(*args, **kwargs))
    return made[-1]

  monkeypatch.setattr(program, "make_train_step", kept)
  pretrain.run(config, str(tmp_path))
  pretrain.run(dataclasses.replace(config, num_steps=12), str(tmp_path))
  # Also after a restore: restored arrays are placed as new ones are.
  assert [train_step.on_leaves._cache_size() for train_step in made] == [1, 1]


@pytest.mark.parametrize(
  "change",
  [
    {"step.accumulation": "2"},
    {"mesh.data": "1", "mesh.fsdp": "2", "mesh.tensor": "2"},
  ],
)
def test_losses_do_not_depend_on_how_a_step_is_split(
  whole, config, tmp_path, change
):
  config = pretrain.cli.override(config, change | {"num_steps": "4"})
  found = losses(pretrain.run(config, str(tmp_path)).history)
  wanted = losses(whole[0].history)
  np.testing.assert_allclose(
    list(found.values()),
    [wanted[number] for number in found],
    **tolerance("mesh"),
  )


def test_continues_another_mesh_and_refuses_another_model(
  whole, config, tmp_path
):
  shutil.copytree(whole[1] / "checkpoints", tmp_path / "checkpoints")
  longer = pretrain.cli.override(
    config, {"num_steps": "11", "mesh.data": "1", "mesh.tensor": "2"}
  )
  result = pretrain.run(longer, str(tmp_path))
  assert int(result.state.step) == 11
  other = pretrain.cli.override(config, {"model.num_layers": "3"})
  with pytest.raises(
    ValueError, match=r"(?s)another model.*model\.num_layers: 2 .*, 3 here"
  ):
    pretrain.run(other, str(tmp_path))


def test_continues_from_weights(whole, config, tmp_path):
  result, workdir = whole
  start = dataclasses.replace(config, init_from=str(workdir), num_steps=3)
  found = losses(pretrain.run(start, str(tmp_path / "a")).history)
  assert found[1] < losses(result.history)[1] - 1.0
  other = pretrain.cli.override(start, {"model.mlp_dim": "56"})
  with pytest.raises(ValueError, match=r"model\.mlp_dim: 48 in .*, 56 in the"):
    pretrain.run(other, str(tmp_path / "b"))
  lost = dataclasses.replace(start, init_from=str(tmp_path / "lost"))
  with pytest.raises(ValueError, match=r"init_from=.* does not exist"):
    pretrain.run(lost, str(tmp_path / "c"))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"data.seq_len": "65"}, r"data\.seq_len=65 .*model\.max_positions=64"),
    ({"model.vocab_size": "319"}, r"tokenizer has 320 tokens .*vocab_size=319"),
    (
      {"data.global_batch_size": "3"},
      r"global_batch_size=3 must be a .*mesh\.data=2",
    ),
    ({"step.accumulation": "3"}, "accumulation=3"),
    ({"mesh.data": "16"}, "16 devices, but there are 8"),
    ({"num_steps": "0"}, "num_steps must be at least 1"),
    ({"data.tokenizer": "absent.model"}, "'absent.model' does not exist"),
  ],
)
def test_bad_settings_are_refused(config, tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    pretrain.run(pretrain.cli.override(config, change), str(tmp_path))
