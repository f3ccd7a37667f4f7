"""Bytes on the links, against what the TPU's compiler was recorded to send."""

import dataclasses

import pytest

from plan.traffic import traffic
from sharding.collectives import zero_bytes
from tests.plan.test_memory import SEVEN, run_config
from tests.train import golden
from tests.train.tiny import GQA
from train.config import LocalSGDConfig

RECORDED = golden.recorded()["0.10"]


def planned(name: str) -> dict[str, float]:
  recipe = golden.RECIPES[name]
  config = run_config(
    dataclasses.replace(golden.MODEL, moe=recipe.moe),
    rows=16,
    seq_len=golden.MODEL.max_positions,
    precision="bf16",
    remat="block",
    accumulation=2,
    zero_stage=recipe.zero_stage,
    **dataclasses.asdict(recipe.mesh),
  )
  found = traffic(config, 8, "tpu").by_axes
  return {" ".join(sorted(axes)): sent for axes, sent in found.items()}


def compiled(name: str) -> dict[str, float]:
  """Axes -> bytes, of `tests/train/golden.json`."""
  totals = {}
  for key, (_, sent) in RECORDED[name].items():
    axes = key.split(" over ")[1]
    totals[axes] = totals.get(axes, 0) + sent
  return totals


@pytest.mark.parametrize(
  ("name", "axes"),
  [
    ("data", "data"),
    ("fsdp", "fsdp"),
    ("zero-2", "fsdp"),
    ("tensor", "tensor"),
    ("fsdp x tensor", "fsdp"),
    ("fsdp x tensor", "tensor"),
    ("context", "fsdp"),
    ("context", "context"),
    ("expert", "fsdp"),
    ("pipeline", "pipeline"),
  ],
)
def test_bytes_are_those_of_the_compiled_step(name, axes):
  # Experts' weights are gathered once more than layers' are.
  rel = 0.15 if name == "expert" else 0.07
  assert planned(name)[axes] == pytest.approx(compiled(name)[axes], rel=rel)


def test_no_axis_is_forgotten():
  for name in golden.RECIPES:
    ours, theirs = planned(name), compiled(name)
    small = 0.005 * sum(theirs.values())
    missing = {a for a, sent in theirs.items() if sent > small} - ours.keys()
    assert not missing, (name, missing)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_sends_what_its_article_says(stage):
  """2 M for stages 1 and 2, 3 M for stage 3; M in float32."""
  config = run_config(
    dataclasses.replace(SEVEN, vocab_size=8),
    rows=8,
    seq_len=64,
    precision="float32",
    fsdp=8,
    zero_stage=stage,
  )
  found = traffic(config, 8, "tpu").sent
  weights = sum(
    n for (_, purpose), n in found.items() if purpose != "embeddings"
  )
  want = zero_bytes(4 * 6.476e9, 8, stage=stage)
  assert weights == pytest.approx(want, rel=1e-2)


def test_one_device_sends_nothing():
  assert not traffic(run_config(GQA, rows=8, seq_len=32), 1, "tpu").sent


def test_recomputation_sends_activations_again():
  run = lambda remat: traffic(
    run_config(GQA, rows=8, seq_len=32, tensor=4, remat=remat), 4, "tpu"
  ).by_axes[("tensor",)]
  assert run("none") == run("dots") < run("block") < run("nested")


@pytest.mark.parametrize(
  "settings", [{"compression": "int8"}, {"local": LocalSGDConfig(steps=5)}]
)
def test_what_replicas_say_else_is_not_counted(settings):
  config = run_config(GQA, rows=8, seq_len=32, data=8, **settings)
  with pytest.raises(ValueError, match="wanted step.compression=none and"):
    traffic(config, 8, "tpu")
