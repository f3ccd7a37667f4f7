"""The compiled step of a pipeline: who talks to whom, and where."""

import dataclasses

import pytest
from jax.sharding import Mesh

from pallas_kernels.aot import topology_devices
from sharding import hlo
from sharding.axes import MeshConfig
from sharding.mesh import make_mesh
from tests.train import programs, tiny
from tests.train import test_tpu_program as program

AXES = MeshConfig(pipeline=2, fsdp=2, tensor=2)
MICRO = 4


def check_collectives(text: str, mesh: Mesh):
  """Stages may be in different branches: no group may need two of them."""
  found = hlo.collectives(text, mesh)
  inside = [op for op in found if op.in_branch]
  axes = frozenset().union(*(op.axes for op in inside))
  assert axes == {"fsdp", "tensor"}, axes
  # What stages say to each other stands outside: activations, gradients.
  between = [op for op in found if "pipeline" in op.axes and op.in_loop]
  kinds = {op.kind for op in between}
  assert kinds == {"collective-permute"}, kinds
  assert not any(op.in_branch for op in between)


@pytest.mark.parametrize(
  "schedule", ["1f1b", pytest.param("zero_bubble", marks=pytest.mark.slow)]
)
def test_collectives_in_branches_stay_within_a_stage(schedule):
  mesh = make_mesh(AXES)
  made = programs.make(
    tiny.GQA,
    mesh,
    16,
    seq_len=tiny.LENGTH,
    accumulation=MICRO,
    schedule=schedule,
  )
  check_collectives(made.lower().compile().as_text(), mesh)


@pytest.mark.tpu_compiler
def test_compiles_for_a_tpu():
  """With kernels in the stages, in bf16; and there, too, nothing crosses."""
  mesh = make_mesh(AXES, devices=topology_devices("v5e:2x4"))
  config = dataclasses.replace(program.CONFIG, num_layers=4)
  made = programs.make(
    config,
    mesh,
    MICRO * program.ROWS,
    accumulation=MICRO,
    precision="bf16",
  )
  text = made.lower().compile().as_text()
  assert "flash_attention_bwd" in text
  check_collectives(text, mesh)
