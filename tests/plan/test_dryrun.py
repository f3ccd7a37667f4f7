"""The command line, and what needs no compiler."""

import json
import subprocess
import sys

import pytest

from configs import cli
from plan import dryrun, memory, step_time
from plan.chips import parse
from plan.loops import LOOPS
from tests.plan import dry_runs


def test_a_gpu_by_estimate(tmp_path, capsys):
  config = cli.load(f"{dry_runs.write(tmp_path)}:dpo")
  path = tmp_path / "found.json"
  found = dryrun.run(config, "h100:2x2", "dpo", str(path))
  assert json.loads(path.read_text()) == found
  run = LOOPS["dpo"].as_pretraining(config, LOOPS["dpo"].model(config))
  bounds = step_time.step_time(run, parse("h100:2x2"))
  assert found["need"] == memory.training(run, 4, "gpu").peak
  assert found["times"]["hidden"] == bounds.hidden
  assert found["rates"]["exposed"]["hfu"] == bounds.hfu(bounds.exposed)
  assert found["checkpoint_bytes"] == bounds.checkpoint_bytes
  text = capsys.readouterr().out
  assert "dpo on 4 x h100 (h100:2x2), fsdp 2, tensor 2" in text
  assert "bound by" in text and "as it is scheduled" not in text


def test_a_reference_that_stays_needs_its_place(tmp_path):
  config = cli.load(f"{dry_runs.write(tmp_path)}:dpo")
  live = cli.override(config, {"reference": "live"})
  found = [dryrun.run(run, "h100:4", "dpo") for run in (config, live)]
  weights = found[1]["memory"]["reference"]
  assert found[1]["need"] - found[0]["need"] == weights
  assert weights == found[0]["memory"]["parameters"]


def test_what_does_not_fit_is_told_what_to_change(tmp_path, capsys):
  config = cli.configure(
    f"{dry_runs.write(tmp_path)}:pretrain",
    LOOPS["pretrain"].config_class,
    {"data.global_batch_size": "1048576", "step.remat": "none"},
  )
  found = dryrun.run(config, "a100:4")
  assert not found["fits"] and found["remedies"]
  text = capsys.readouterr().out
  assert "does not fit" in text
  for remedy in found["remedies"]:
    assert f"--config.{remedy['settings'][0]}" in text


def test_without_the_compiler_it_says_what_to_install(tmp_path, monkeypatch):
  config = cli.load(f"{dry_runs.write(tmp_path)}:pretrain")
  monkeypatch.setattr(dryrun, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r'pip install "onemesh\[plan\]"'):
    dryrun.run(config, "v5e:2x2")


@pytest.mark.parametrize(
  ("topology", "settings", "words"),
  [
    (None, {}, "--topology is missing"),
    ("v9:2x2", {}, "there are figures of v4, v5e, v5p, v6e, a100, h100, h200"),
    ("h100:8", {"mesh.fsdp": "3"}, "config.mesh uses 6 of the 8 devices"),
    ("h100:8", {"mesh.tensor": "3"}, "do not divide by"),
    ("h100:8", {"data.global_batch_size": "6"}, "global_batch_size=6"),
  ],
)
def test_mistakes(topology, settings, words, tmp_path):
  entry = LOOPS["pretrain"].config_class
  path = f"{dry_runs.write(tmp_path)}:pretrain"
  config = cli.configure(path, entry, settings)
  with pytest.raises(ValueError, match=words):
    dryrun.run(config, topology)


def test_the_loop_says_what_the_config_must_be(tmp_path):
  path = dry_runs.write(tmp_path)
  command = [sys.executable, "-m", "plan.dryrun", "--topology=h100:4"]
  say = lambda *flags: subprocess.run(
    [*command, *flags], capture_output=True, text=True
  )
  got = say(f"--config={path}:sft", "--loop=pretrain")
  assert got.returncode == 1 and got.stderr == (
    "error: --config: this command wants a PretrainConfig,"
    f" {path}:sft returned SFTConfig\n"
  )
  got = say(f"--config={path}:sft", "--loop=rlhf")
  assert got.stderr.startswith(
    "error: --loop must be one of ('pretrain', 'sft'"
  )
