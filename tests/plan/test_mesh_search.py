"""The search against all combinations, and what it says to its user."""

import dataclasses
import json

import jax
import pytest
from flax import nnx

from model.families.llama import smollm2_135m
from model.transformer import Transformer
from plan import candidates, chips, compiled, mesh_search, meshes
from plan.memory import training
from plan.step_time import step_time
from sharding.axes import MeshConfig, Rules
from tests.plan.test_memory import run_config
from tests.train.tiny import GQA
from train.config import OffloadConfig, StepConfig


def machine_of(topology: str, hbm_bytes: float) -> chips.Topology:
  """A machine whose devices have so much memory."""
  machine = chips.parse(topology)
  chip = dataclasses.replace(machine.chip, hbm_bytes=hbm_bytes)
  return dataclasses.replace(machine, chip=chip)


def all_ways(config, machine):
  """(seconds, peak) of every combination that the loop would run."""
  model = jax.eval_shape(lambda: Transformer(config.model, rngs=nnx.Rngs(0)))
  for mesh in meshes.every(machine.num_devices, experts=False):
    for choice in candidates._choices(config, mesh):
      try:
        run = candidates._chosen(config, mesh, choice)
        meshes.check(run, model, machine.num_devices)
        planned = training(run, machine.num_devices, "tpu")
      except ValueError:
        continue
      yield step_time(run, machine, planned).likely, planned.peak


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:1x2", "v5e:2x2"])
def test_the_best_of_all_combinations_is_found(topology):
  config = run_config(GQA, rows=2, seq_len=32, precision="bf16")
  generous = machine_of(topology, 1e9)
  ways = sorted(all_ways(config, generous))
  assert len(ways) > 20
  peaks = sorted(peak for _, peak in ways)
  # Room for all, for a half, for few.
  for room in (peaks[-1], peaks[len(peaks) // 2], peaks[2]):
    machine = machine_of(topology, room / (1 - candidates._MARGIN) + 1)
    best = candidates.best_of_each(config, machine)[0]
    want = min(seconds for seconds, peak in ways if peak <= room)
    assert best.fits and best.time.likely == want
    assert best.memory.peak <= room
  machine = machine_of(topology, peaks[0] / 2)
  found = candidates.best_of_each(config, machine)
  assert not any(way.fits for way in found)
  assert "even with remat nested" in found[0].why(found[0], machine)


def test_each_mesh_has_its_reason(capsys, tmp_path):
  # 6 rows do not go round 4 stages, and may pass them one by one.
  config = run_config(GQA, rows=6, seq_len=30, precision="bf16")
  path = tmp_path / "found.json"
  found = mesh_search.run(config, "v5e:2x2", show=3, json_path=str(path))
  rows = json.loads(path.read_text())
  assert len(rows) == len(found) == 15
  assert rows[0]["fits"] and rows[0]["likely"] == min(
    row["likely"] for row in rows if row["likely"]
  )
  # 30 positions do not divide by 4.
  alone = next(row for row in rows if row["mesh"]["context"] == 4)
  assert "30" in alone["why"] and alone["likely"] is None
  for row in rows[1:]:
    if row["likely"]:
      name, _, number = row["why"].removeprefix("links of ").partition(": ")
      assert number.startswith(f"{row['seconds'][name]:.3f} s a step")
  text = capsys.readouterr().out
  assert "12 more: --show=15" in text
  # What is printed last is code.
  code = "dict(" + text[text.index("mesh=") :] + ")"
  names = {"MeshConfig": MeshConfig, "Rules": Rules, "StepConfig": StepConfig}
  chosen = eval(code, names)
  best = found[0].config
  assert chosen["mesh"] == best.mesh and chosen["rules"] == best.rules
  for key in ("zero_stage", "accumulation", "remat", "schedule"):
    assert getattr(chosen["step"], key) == getattr(best.step, key)


def test_the_compiler_has_the_last_word(monkeypatch, capsys, tmp_path):
  """Of three, one does not compile, and the last is the fastest."""
  config = run_config(GQA, rows=4, seq_len=32, precision="bf16")
  asked = []

  def compile_step(loop, run, topology):
    asked.append(run.mesh)
    if len(asked) == 1:
      return {"rejected": "compiler crash (signal 6): no word"}
    memory = {"arguments": 2**30, "temporaries": 2**29, "peak": 2**40}
    return {"memory": memory, "times": {"estimate": 1.0 / len(asked)}}

  monkeypatch.setattr(compiled, "compile_step", compile_step)
  path = tmp_path / "found.json"
  found = mesh_search.run(config, "v5e:2x2", verify=3, json_path=str(path))
  assert len(asked) == 3 and found[0].config.mesh == asked[2]
  assert [way.config.mesh for way in found[1:3]] == asked[:2]
  text = capsys.readouterr().out
  assert "rejected: compiler crash (signal 6): no word" in text
  assert text.endswith(f"{mesh_search.code(found[0].config)}\n")
  rows = [row["compiled"] for row in json.loads(path.read_text())[:3]]
  assert [row["fits"] for row in rows] == [False, True, True]
  assert rows[2]["need"] == 2**30 + 2**29


def test_settings_that_exclude_each_other_are_left_out():
  config = run_config(
    GQA,
    rows=2,
    seq_len=32,
    remat="block",
    offload=OffloadConfig(activations=True),
  )
  found = candidates.best_of_each(config, chips.parse("v5e:1x2"))
  assert found[0].fits and found[0].config.step.remat in ("dots", "block")
  refused = [way for way in found if way.config.mesh.pipeline > 1]
  assert refused and all("offload" in way.refused for way in refused)


def test_a_run_by_name():
  config = mesh_search.run_config("smollm2_135m", None, 1024, 8192)
  assert config.model == smollm2_135m()
  assert config.data.seq_len == 1024 and config.data.global_batch_size == 8
  file = "configs/smollm2_135m.py:v5e-8"
  config = mesh_search.run_config(None, file)
  assert config.data.global_batch_size == 512


@pytest.mark.parametrize(
  ("asked", "want"),
  [
    ((None, None), "wanted one of --model"),
    (("llama3_8b", "configs/sft.py"), "wanted one of --model"),
    (("llama3_8", None, None, 8192), "did you mean one of.*llama3_8b"),
    (("llama3_8b", None), "--global_batch_tokens is missing"),
    (("llama3_8b", None, 1024, 1000), "multiple of the 1024 tokens of a row"),
    ((None, "configs/sft.py"), "this command wants a PretrainConfig"),
  ],
)
def test_what_is_refused(asked, want):
  with pytest.raises(ValueError, match=want):
    mesh_search.run_config(*asked)


@pytest.mark.parametrize(
  ("topology", "hbm_bytes", "want"),
  [
    ("v5e:1x1", 1.25e9, "v5e:1x2 with at least 2 rows"),
    pytest.param(
      "h100:8",
      0.4e9,
      "h100:2x.8. with at least 16 rows",
      marks=pytest.mark.slow,
    ),
  ],
)
def test_where_it_fits_nowhere_the_smallest_slice_is_named(
  monkeypatch, topology, hbm_bytes, want
):
  rows = chips.parse(topology).num_devices
  config = mesh_search.run_config("smollm2_135m", None, 128, rows * 128)
  chip = machine_of(topology, hbm_bytes).chip
  monkeypatch.setitem(chips.CHIPS, chip.name, chip)
  with pytest.raises(ValueError, match=f"on no mesh of {rows} x.*={want}"):
    mesh_search.run(config, topology)
