"""Legal meshes, against the step's own opinion of each."""

import dataclasses
import itertools
import math

import pytest

from plan import memory, meshes
from sharding.axes import MESH_AXES, MeshConfig
from tests.plan.test_memory import run_config
from tests.train.tiny import GQA, MOE
from train.config import LocalSGDConfig, OffloadConfig


@pytest.mark.parametrize(
  ("model", "num_devices", "settings"),
  [
    (GQA, 4, {}),
    (GQA, 4, {"compression": "int8"}),
    (GQA, 4, {"local": LocalSGDConfig(steps=5)}),
    (GQA, 4, {"offload": OffloadConfig(optimizer=True)}),
    pytest.param(GQA, 8, {}, marks=pytest.mark.slow),
    pytest.param(MOE, 8, {}, marks=pytest.mark.slow),
  ],
  ids=["few", "compressed", "apart", "offloaded", "dense", "experts"],
)
def test_they_are_those_that_the_plan_of_a_step_takes(
  model, num_devices, settings
):
  config = run_config(model, rows=16, seq_len=6, accumulation=2, **settings)
  found = meshes.find(config, num_devices)
  brute = []
  for sizes in itertools.product((1, 2, 4, 8), repeat=len(MESH_AXES)):
    if math.prod(sizes) != num_devices:
      continue
    mesh = MeshConfig(**dict(zip(MESH_AXES, sizes, strict=True)))
    if mesh.expert > 1 and model.moe is None:
      continue
    try:
      memory.training(
        dataclasses.replace(config, mesh=mesh), num_devices, "cpu"
      )
    except ValueError:
      continue
    brute.append(mesh)
  assert set(found.legal) == set(brute)
  # 6 positions do not divide by 4.
  assert found.refused


def test_a_reason_is_given_for_each_other():
  found = meshes.find(run_config(GQA, rows=4, seq_len=32), 8)
  assert not set(found.legal) & set(found.refused)
  reason = found.refused[MeshConfig(data=8, fsdp=1)]
  assert "global_batch_size=4 must be a positive multiple of 8" in reason
  reason = found.refused[MeshConfig(fsdp=1, tensor=8)]
  assert "does not divide by mesh tensor=8" in reason
