"""Memory before a step is compiled, against what compilers plan for it."""

import dataclasses
import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

from data.config import DataConfig, TokenSource
from model.execution import Execution
from model.families.llama import llama2_7b, llama3_8b
from plan import held, memory
from plan.chips import parse
from sharding.axes import MESH_AXES, MeshConfig, Rules
from sharding.mesh import make_mesh
from tests.train import tiny
from train import pretrain
from train.config import (
  LocalSGDConfig,
  OffloadConfig,
  OptimizerConfig,
  StepConfig,
)
from train.objective import lm_loss
from train.run_config import PretrainConfig

GB = 1e9


def run_config(model, *, rows, seq_len, rules=None, optimizer=None, **axes):
  """A run of one step's settings; `axes` are of the mesh or of the step."""
  steps = {f.name for f in dataclasses.fields(StepConfig)} - {*MESH_AXES}
  step = {name: axes.pop(name) for name in steps & axes.keys()}
  return PretrainConfig(
    model=model,
    data=DataConfig(
      sources=(TokenSource(path="none"),),
      tokenizer="none",
      seq_len=seq_len,
      global_batch_size=rows,
    ),
    num_steps=1,
    mesh=MeshConfig(**({"fsdp": 1} | axes)),
    rules=rules or Rules(),
    optimizer=optimizer or OptimizerConfig(),
    step=StepConfig(**step),
  )


# A Llama 2 of 7.00e9 parameters: the "7B" of the article's table.
SEVEN = dataclasses.replace(llama2_7b(), vocab_size=64_000)


def test_the_table_of_the_article():
  """7B, AdamW, float32: 28 + 28 + 56 = 112 GB; ZeRO-3 over 8: 14 GB."""
  one = run_config(SEVEN, rows=8, seq_len=2048)
  found = memory.training(one, 1, "gpu").parts
  names = ("parameters", "gradients", "optimizer state")
  state = [found[name] / GB for name in names]
  np.testing.assert_allclose(state, [28, 28, 56], rtol=1e-3)
  eight = dataclasses.replace(one, mesh=MeshConfig(fsdp=8))
  found = memory.training(eight, 8, "gpu").parts
  assert sum(found[n] for n in names) / GB == pytest.approx(14, rel=1e-3)


@pytest.mark.parametrize(
  ("stage", "mixed", "want"),
  [
    (1, False, 4 + 4 + 8 / 8),
    (2, False, 4 + 4 / 8 + 8 / 8),
    (3, False, 16 / 8),
    (1, True, 2 + 2 + 12 / 8),
    (2, True, 2 + 2 / 8 + 12 / 8),
    (3, True, 16 / 8),
  ],
)
def test_zero_stages_have_the_bytes_of_their_article(stage, mixed, want):
  config = run_config(
    SEVEN,
    rows=16,
    seq_len=2048,
    optimizer=OptimizerConfig(master_weights=mixed),
    fsdp=8,
    zero_stage=stage,
    accumulation=2,
  )
  found = memory.training(config, 8, "gpu").parts
  names = ("parameters", "gradients", "optimizer state")
  assert sum(found[n] for n in names) / 7e9 == pytest.approx(want, rel=1e-3)


def compiled(config: PretrainConfig):
  """The training step of a run on emulated devices, as it is planned."""
  made = pretrain.program(config, make_mesh(config.mesh))
  return made.lower().compile().memory_analysis()


slow = pytest.mark.slow
CELLS = {
  "tensor": (tiny.GQA, dict(fsdp=4, tensor=2)),
  "stage 1": (tiny.MHA, dict(data=2, fsdp=4, zero_stage=1, accumulation=2)),
  "experts": (tiny.MOE, dict(fsdp=2, expert=4)),
  "pipeline": (tiny.GQA, dict(pipeline=4, fsdp=2, accumulation=4)),
  "apart": (tiny.GQA, dict(data=2, fsdp=4, local=LocalSGDConfig(steps=5))),
}


@pytest.mark.parametrize(
  "cell",
  ["tensor", *(pytest.param(c, marks=slow) for c in CELLS if c != "tensor")],
)
def test_arguments_are_those_of_the_compiled_step(cell):
  model, settings = CELLS[cell]
  config = run_config(
    model,
    rows=16,
    seq_len=32,
    optimizer=OptimizerConfig(master_weights="zero_stage" in settings),
    precision="float32",
    **settings,
  )
  found = memory.training(config, 8, "cpu").parts
  ours = sum(found[name] for name in memory.BETWEEN_STEPS)
  theirs = compiled(config).argument_size_in_bytes
  # Step, key and counts are a few integers, and arrays are aligned.
  assert 0 <= theirs - ours < 4096 and ours > 8 * 4096


LAYERS = dataclasses.replace(
  tiny.GQA, embed_dim=64, num_layers=4, mlp_dim=192, layer_pattern=("global",)
)


def growth(remat, compile_step, **axes):
  """What eight more layers keep, and the same as a compiler plans it."""
  configs = [
    run_config(
      dataclasses.replace(LAYERS, num_layers=num_layers),
      rows=8,
      seq_len=64,
      remat=remat,
      precision="float32",
      **axes,
    )
    for num_layers in (4, 12)
  ]
  n = math.prod(axes.values())
  parts = [memory.training(config, n, "cpu").parts for config in configs]
  grows = lambda name: parts[1][name] - parts[0][name]
  temps = [compile_step(config).temp_size_in_bytes for config in configs]
  return grows("activations"), grows("gradients"), temps[1] - temps[0]


@pytest.mark.parametrize(
  "remat",
  ["dots", pytest.param("none", marks=slow), pytest.param("block", marks=slow)],
)
def test_activations_grow_as_those_of_the_compiled_gradient(remat):
  def gradient(config):
    model = held.hold(config, 1).state.model
    # Arrays without a place.
    model = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model
    )
    batch = tiny.packed_batch(rows=8, length=64)
    execution = Execution(remat=remat)
    loss = lambda model: lm_loss()(model, batch, None, execution)[0]
    lowered = jax.jit(jax.grad(loss)).lower(model)
    return lowered.compile().memory_analysis()

  # The gradient is the output, no temporary.
  ours, _, theirs = growth(remat, gradient)
  assert ours == pytest.approx(theirs, rel=0.05)


@slow
@pytest.mark.parametrize("remat", ["none", "dots", "block"])
def test_activations_grow_as_those_of_the_compiled_step(remat):
  activations, gradients, theirs = growth(remat, compiled, data=2, tensor=2)
  assert activations + gradients == pytest.approx(theirs, rel=0.05)


# What the compiler of TPUs planned (`compiled.memory_analysis()`, libtpu
# 0.0.52) for Llama-3-8B's layers, bf16, AdamW: layers, vocabulary, T, rows a
# device, settings -> GB at the peak on v5p:2x2x1.
RECORDED = [
  (8, 32_000, 4096, 1, dict(fsdp=4, remat="block"), 10.0161),
  (4, 32_000, 2048, 1, dict(fsdp=4, remat="none"), 9.6002),
  (8, 32_000, 4096, 1, dict(fsdp=2, tensor=2, remat="block"), 9.5463),
]


@pytest.mark.parametrize("row", RECORDED, ids=str)
def test_peaks_are_near_those_of_the_tpu_compiler(row):
  num_layers, vocab, seq_len, rows, settings, want = row
  model = dataclasses.replace(
    llama3_8b(), num_layers=num_layers, vocab_size=vocab
  )
  rows *= settings["fsdp"] * settings.get("accumulation", 1)
  config = run_config(
    model, rows=rows, seq_len=seq_len, precision="bf16", **settings
  )
  assert memory.training(config, 4, "tpu").peak / GB == pytest.approx(
    want, rel=0.05
  )


def test_the_four_models_of_ppo():
  """16 + 16 + 2 + 2 bytes a parameter, 2.25 times one model's training."""
  config = run_config(
    SEVEN,
    rows=8,
    seq_len=1024,
    optimizer=OptimizerConfig(master_weights=True),
    fsdp=8,
  )
  found = memory.of_loop("ppo", config, 8, "tpu").parts
  state = found["parameters"] + found["optimizer state"] + found["gradients"]
  names = ("critic", "reference", "reward model")
  # Gradients of the critic stand where those of the policy do, in turn.
  held_ = state + found["gradients"] + sum(found[name] for name in names)
  assert held_ * 8 / 7e9 == pytest.approx(36, rel=1e-3)
  # 2 L N H values a token, a row a device.
  assert found["KV cache"] == 2 * 32 * 32 * 128 * 2 * 1024


def test_loops_hold_what_they_need():
  config = run_config(llama3_8b(), rows=8, seq_len=4096, fsdp=4, tensor=2)
  find = lambda loop: memory.of_loop(loop, config, 8, "gpu")
  step, dpo, generate = map(find, ("pretrain", "dpo", "generate"))
  assert dpo.peak == step.peak + step.parts["parameters"]
  heads = llama3_8b().num_kv_heads // 2
  assert generate.parts["KV cache"] == 2 * 32 * heads * 128 * 2 * 2 * 4096
  assert generate.parts["parameters"] == step.parts["parameters"]
  with pytest.raises(ValueError, match="--loop must be one of"):
    find("rl")


@pytest.mark.parametrize("remat", ["block", "none"])
def test_offload_moves_parts_to_the_host(remat):
  whole = dict(fsdp=4, remat="block", accumulation=2, offload=OffloadConfig())
  moved = OffloadConfig(optimizer=True, gradients=True, activations=True)
  if remat == "none":
    moved = dataclasses.replace(moved, activations=False)
  run = lambda **more: memory.training(
    run_config(tiny.GQA, rows=16, seq_len=32, **(whole | more)), 4, "tpu"
  )
  here, there = run(), run(offload=moved)
  names = ("optimizer state", "gradients", "activations")
  lost = sum(here.parts[n] - there.parts[n] for n in names)
  assert there.host == lost > 0


def test_a_pipeline_keeps_the_inputs_that_are_in_flight():
  """1F1B: 2 P - 1 micro-batches, whatever their number (docs/decisions.md)."""
  run = lambda M, schedule: memory.training(
    run_config(
      tiny.GQA,
      rows=M,
      seq_len=32,
      pipeline=4,
      accumulation=M,
      schedule=schedule,
      precision="float32",
    ),
    4,
    "cpu",
  ).parts["between stages"]
  hidden = 32 * tiny.GQA.embed_dim * 4
  assert run(8, "1f1b") == run(16, "1f1b") <= 2 * 4 * hidden
  assert run(16, "gpipe") > 16 * hidden


def test_what_does_not_fit_is_told_what_to_change():
  config = run_config(llama3_8b(), rows=8, seq_len=8192, remat="none")
  machine = parse("v5e:1x1")
  found = memory.training(config, 1, "tpu")
  assert found.peak > machine.chip.hbm_bytes
  text = memory.table(found, machine, {})
  assert "does not fit" in text and "a stronger step.remat" in text


@pytest.mark.parametrize(
  ("settings", "words"),
  [
    (dict(fsdp=3), "config.mesh uses 3 of the 8 devices"),
    (dict(fsdp=16), "the mesh asks for fsdp=16"),
    (dict(tensor=8), "does not divide by mesh tensor=8"),
    (dict(fsdp=8, accumulation=3), "global_batch_size=16 must be"),
    (dict(pipeline=8), "8 virtual stages"),
  ],
)
def test_what_the_loop_would_refuse_is_refused(settings, words):
  config = run_config(tiny.GQA, rows=16, seq_len=32, **settings)
  with pytest.raises(ValueError, match=words):
    memory.training(config, 8, "tpu")


def test_the_table_and_the_file(tmp_path, capsys):
  path = tmp_path / "memory.json"
  config = run_config(tiny.GQA, rows=16, seq_len=32, fsdp=4, tensor=2)
  memory.run(config, "v5e:2x4", json_path=str(path))
  found = json.loads(path.read_text())
  assert found["fits"] and found["peak"] == max(found["by_phase"].values())
  text = capsys.readouterr().out
  assert f"peak {found['peak'] / 2**30:.2f} of 15.8 GiB, 8 x v5e" in text
  kept = found["activations"]
  assert kept["none"] > kept["dots"] > kept["block"] >= kept["nested"]


def test_a_mistake_is_told_in_a_line():
  command = [sys.executable, "-m", "plan.memory"]
  command += ["--config=configs/smollm2_135m.py:v5e-8"]
  got = subprocess.run(command, capture_output=True, text=True)
  assert got.returncode == 1
  assert got.stderr == (
    "error: --topology is missing: 'v5e:4x4', 'h100:8', ...\n"
  )
