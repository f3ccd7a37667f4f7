"""A token of generation: the arguments are those of a real call."""

import jax
import pytest

from configs import cli
from plan import dryrun, generation, memory
from serve import decode
from serve.config import Sampling
from serve.generate import generate
from sharding.axes import MeshConfig
from sharding.mesh import make_mesh
from sharding.rules import tree_shardings
from tests.plan import dry_runs
from tests.plan.test_memory import run_config
from tests.train.tiny import GQA, random_model

ROWS, SLOTS = 8, 64


def test_the_arguments_are_those_of_a_call(monkeypatch):
  config = run_config(GQA, rows=ROWS, seq_len=SLOTS, fsdp=4, tensor=2)
  mesh = make_mesh(config.mesh)
  ours = generation.program(config, mesh)
  lowered = ours.lower()

  model = random_model(GQA)
  model = jax.device_put(model, tree_shardings(model, mesh, config.rules))
  real, calls = decode.decode, []

  def spy(*args, **how):
    calls.append((args, how))
    return real(*args, **how)

  monkeypatch.setattr(decode, "decode", spy)
  prompts = [[1, 2, 3]] * ROWS
  # 3 and 33 tokens round up to all slots, and 33 to as much room.
  generate(
    model, prompts, Sampling(max_new_tokens=33), execution=ours.execution
  )
  (args, how), *_ = calls
  assert how == {"execution": ours.execution}
  shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
  wanted, _ = lowered.args_info
  assert shapes(wanted) == shapes(args)

  there = jax.tree.leaves(lowered.compile().input_shardings[0])
  weights = jax.tree.leaves(model)
  for leaf, place in zip(weights, there, strict=False):
    assert place.is_equivalent_to(leaf.sharding, leaf.ndim)
  cache = jax.tree.leaves(args[1].cache)
  of_cache = there[len(weights) : len(weights) + len(cache)]
  for leaf, place in zip(cache, of_cache, strict=True):
    assert place.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_bytes_are_those_of_the_memory_table():
  config = run_config(
    GQA, rows=ROWS, seq_len=SLOTS, fsdp=4, tensor=2, precision="bf16"
  )
  program = generation.program(config, make_mesh(config.mesh))
  found = program.lower().compile().memory_analysis()
  planned = memory.of_loop("generate", config, 8, "tpu").parts
  known = planned["parameters"] + planned["KV cache"]
  # The rest is ids, positions and settings of the rows.
  assert 0 < found.argument_size_in_bytes - known < 40 * SLOTS


def test_what_is_refused(tmp_path):
  config = run_config(GQA, rows=ROWS, seq_len=SLOTS, pipeline=2, fsdp=4)
  with pytest.raises(ValueError, match="mesh.pipeline=1.*got 2"):
    generation.program(config, make_mesh(config.mesh))
  config = run_config(GQA, rows=6, seq_len=SLOTS, fsdp=8)
  with pytest.raises(ValueError, match="batch.*size 6"):
    generation.program(config, make_mesh(config.mesh)).lower()
  config = cli.load(f"{dry_runs.write(tmp_path)}:pretrain")
  with pytest.raises(ValueError, match="TPUs alone"):
    dryrun.run(config, "h100:4", "generate")


def test_flops_of_a_token():
  config = run_config(GQA, rows=ROWS, seq_len=SLOTS, fsdp=8)
  tokens, flops = generation.work(config, 8)
  assert tokens == 1
  # A token's matmuls, and with all it sees half as many scores as slots.
  weights = 4 * (48 * 8 * 6 * 2 + 2 * 48 * 4 * 6 + 3 * 48 * 80) + 48 * 104
  seen = [min(5, n) for n in range(1, SLOTS + 1)]
  scores = 4 * 4 * 8 * 6 * sum(seen) / SLOTS
  assert flops == pytest.approx(2 * weights + scores)


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_a_token_on_a_tpu(tmp_path, capsys):
  config = cli.load(f"{dry_runs.write(tmp_path)}:pretrain")
  found = dryrun.run(config, "v5e:2x2", "generate")
  assert found["fits"] and found["tokens"] == 2
  assert MeshConfig(**found["mesh"]) == MeshConfig(fsdp=2, tensor=2)
  assert found["recomputed_flops"] == 0 and found["times"]["estimate"] < 1e-3
  text = capsys.readouterr().out
  assert "generate on 4 x v5e" in text and "checkpoint" not in text
