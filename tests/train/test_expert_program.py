"""A step of a mixture of experts as the TPU's compiler makes it."""

import dataclasses
import functools
import re

import numpy as np
import pytest

from model.config import Moe
from pallas_kernels.aot import topology_devices
from sharding.axes import MeshConfig
from sharding.mesh import make_mesh
from tests.train import programs
from tests.train.test_tpu_program import CONFIG, LENGTH, ROWS

pytestmark = pytest.mark.tpu_compiler

MOE = dataclasses.replace(
  CONFIG, mlp_dim=384, moe=Moe(num_experts=8, num_active=2, balance_loss=0.01)
)


@functools.cache
def program() -> str:
  """HLO of a bf16 step on v5e:2x4, expert x fsdp."""
  devices = topology_devices("v5e:2x4")
  mesh = make_mesh(MeshConfig(expert=4, fsdp=2), devices=devices)
  made = programs.make(MOE, mesh, ROWS, precision="bf16", remat="block")
  return made.lower().compile().as_text()


def test_experts_run_in_kernels():
  kernels = re.findall(r"%([a-z_]+)[.\d]* = .*tpu_custom_call", program())
  assert {"grouped_matmul", "grouped_matmul_outer"} <= set(kernels)


def test_tokens_travel_and_experts_stay():
  """Rows are exchanged; no weight of experts is gathered over `expert`."""
  exchanged = re.findall(
    r"bf16\[(\d+),[\d,]+\]\S* ragged-all-to-all(?:-done)?\(", program()
  )
  X, k = 4, MOE.moe.num_active
  rows = ROWS // 8 * LENGTH * k
  # There: room for all rows of all devices. Back: as many as were sent. Three
  # times each: forward, recomputed, backward.
  assert sorted(map(int, exchanged)) == 3 * [rows] + 3 * [X * rows]
  gathered = re.findall(
    r"\w+\[([\d,]+)\]\S* all-gather(?:-start)?\(", program()
  )
  shapes = [tuple(map(int, dims.split(","))) for dims in gathered]
  ours = MOE.moe.num_experts // X
  of_experts = [shape for shape in shapes if MOE.mlp_dim in shape]
  assert of_experts
  for shape in of_experts:
    assert np.prod(shape) == ours * MOE.embed_dim * MOE.mlp_dim, shape
