"""The TPU's compiler asked in a child: one compilation, and all its ends."""

import json

import pytest

from configs import cli
from pallas_kernels import report_chips
from plan import compiled, dryrun, kernels
from plan.chips import parse
from plan.loops import LOOPS
from sharding import hlo
from sharding.hlo_text import Module
from sharding.mesh import make_mesh
from tests.plan import dry_runs


def answer(tmp_path, code, found=None, log=""):
  (tmp_path / "log").write_text(log)
  if found is not None:
    (tmp_path / "answer").write_text(json.dumps(found))
  return compiled._answer(tmp_path, code)


def test_a_child_that_a_signal_ends_is_a_crash(tmp_path):
  log = "harmless\nF1201 hlo.cc:7] Check failed: n > 0\n*** SIGABRT\n"
  found = answer(tmp_path, -6, log=log)
  assert found == {
    "rejected": "compiler crash (signal 6): F1201 hlo.cc:7] Check failed: n > 0"
  }


def test_other_ends_of_a_child(tmp_path):
  found = answer(tmp_path, 1, log="Fine.\nF1201 06:06 7 env.cc:2] no flag x\n")
  assert found["rejected"].endswith(
    "(exit code 1): F1201 06:06 7 env.cc:2] no flag x"
  )
  with pytest.raises(RuntimeError, match="NameError: x"):
    answer(tmp_path, 1, log="Traceback\nNameError: x\n")
  with pytest.raises(ValueError, match="mesh.fsdp"):
    answer(tmp_path, 0, {"refused": "mesh.fsdp must be"})


@pytest.mark.parametrize(
  ("message", "need"),
  [
    ("RESOURCE_EXHAUSTED: Used 17.14G of 15.75G hbm. Exceeded", 17.14),
    ("E1000: temporaries (24.63G) exceeds available HBM (15.75G).\nx", 24.63),
  ],
)
def test_what_does_not_fit_says_how_much_it_wants(message, need):
  found = compiled._rejected(message)
  assert found["rejected"] == message.splitlines()[0]
  assert found["need"] == int(need * 2**30) and not found["fits"]
  assert found["limit"] == parse("v5e:1x1").chip.hbm_bytes
  assert compiled._rejected("INTERNAL: no\n") == {"rejected": "INTERNAL: no"}


CALL = (
  "HloModule m\n\nENTRY %main (a: f32[8]) -> f32[8] {\n"
  "  %a = f32[8]{0} parameter(0)\n"
  '  %mine.3 = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call",'
  ' backend_config={"cost_estimate":{"flops":"985","bytes_accessed":"N"}}\n}\n'
)


@pytest.mark.parametrize(
  ("num_bytes", "by", "seconds"),
  [(0, "FLOPs", 985 / 197e12), (10**6, "HBM", 10**6 / 819e9)],
)
def test_a_kernel_without_a_schedule_counts_as_stated(
  tmp_path, num_bytes, by, seconds
):
  module = Module(CALL.replace('"N"', f'"{num_bytes}"'))
  chip = report_chips.CHIPS["v5e"]
  found = kernels.read(module, str(tmp_path), chip)["mine.3"]
  assert (found.name, found.by, found.bundles) == ("mine", by, None)
  assert found.seconds == pytest.approx(seconds)
  silent = Module(CALL.replace('"flops":"985","bytes_accessed":"N"', ""))
  assert kernels.read(silent, str(tmp_path), chip)["mine.3"].by == "nothing"


@pytest.mark.tpu_compiler
def test_the_step_of_a_run(tmp_path, capsys):
  """Every figure agrees with the same program, compiled here."""
  path = f"{dry_runs.write(tmp_path)}:pretrain"
  config = cli.load(path)
  machine = parse("v5e:2x2")
  found = dryrun.run(config, "v5e:2x2", json_path=str(tmp_path / "found.json"))
  assert json.loads((tmp_path / "found.json").read_text()) == found

  mesh = make_mesh(config.mesh, devices=compiled.devices(machine, "v5e:2x2"))
  loop = LOOPS["pretrain"]
  step = loop.program(config, loop.model(config), mesh).lower().compile()
  assert found["memory"] == compiled.memory(step)
  sent = {}
  for op in hlo.collectives(step.as_text(), mesh):
    axes = " ".join(sorted(op.axes))
    sent[axes] = sent.get(axes, 0) + op.bytes_sent
  assert {a: row["bytes"] for a, row in found["collectives"].items()} == sent
  assert set(sent) >= {"fsdp", "tensor"}

  times = found["times"]
  whole = sum(row["seconds"] for row in found["collectives"].values())
  assert times["hidden"] <= times["estimate"] <= times["exposed"]
  assert times["exposed"] == pytest.approx(
    times["compute"] + times["waiting for copies"] + whole, rel=0.02
  )
  row = found["rates"]["estimate"]
  assert row["mfu"] == found["model_flops"] / 197e12 / times["estimate"]
  assert row["tokens_per_second"] == 8 * 256 / 4 / times["estimate"]
  assert row["mfu"] < row["hfu"] < 1

  # Two layers: forward, and again for the backward pass.
  calls = {row["name"]: row["calls"] for row in found["kernels"]}
  assert calls["flash_attention_fwd"] == 4 and calls["flash_attention_bwd"] == 2
  assert {row["by"] for row in found["kernels"]} <= {"schedule", "HBM"}
  assert found["fits"] and len(found["ops"]) == 10

  text = capsys.readouterr().out
  for words in (
    "pretrain on 4 x v5e (v5e:2x2), fsdp 2, tensor 2",
    "of 15.75: fits",
    "flash_attention_bwd",
    "as it is scheduled",
    "most expensive",
  ):
    assert words in text


@pytest.mark.tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("loop", ["sft", "dpo"])
def test_the_other_loops(loop, tmp_path):
  config = cli.load(f"{dry_runs.write(tmp_path)}:{loop}")
  found = dryrun.run(config, "v5e:2x2", loop)
  assert found["fits"] and found["tokens"] == (1 + (loop == "dpo")) * 512
  assert {row["by"] for row in found["kernels"]} <= {"schedule", "HBM"}


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_too_much_for_a_chip(tmp_path, capsys):
  config = cli.configure(
    f"{dry_runs.write(tmp_path)}:pretrain",
    LOOPS["pretrain"].config_class,
    {"model.embed_dim": "8192", "model.mlp_dim": "65536", "mesh.tensor": "1"},
  )
  found = dryrun.run(config, "v5e:1x1")
  assert found["need"] > found["limit"] and found["remedies"]
  text = capsys.readouterr().out
  assert "Ran out of memory on HBM" in text
  assert "it would fit, by estimate, with" in text


@pytest.mark.tpu_compiler
def test_a_machine_that_the_compiler_does_not_have():
  with pytest.raises(ValueError, match="of v5e there are 1x1, 2x2, 2x4"):
    compiled.devices(parse("v5e:6x3"), "v5e:6x3")
