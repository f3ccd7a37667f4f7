"""A step of a mixture of experts as the TPU's compiler makes it."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from model.config import Moe
from model.execution import Execution
from model.precision import POLICIES
from model.transformer import Transformer
from pallas_kernels.aot import topology_devices
from sharding.arrays import batch_sharding
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from tests.train import tiny
from tests.train.test_tpu_program import CONFIG, LENGTH, ROWS
from train.config import OptimizerConfig
from train.objective import lm_loss
from train.state import abstract_state, shardings_of
from train.step import make_train_step

pytestmark = pytest.mark.tpu_compiler

MOE = dataclasses.replace(
  CONFIG, mlp_dim=384, moe=Moe(num_experts=8, num_active=2, balance_loss=0.01)
)


@functools.cache
def program() -> str:
  """HLO of a bf16 step on v5e:2x4, expert x fsdp."""
  devices = topology_devices("v5e:2x4")
  mesh = make_mesh(MeshConfig(expert=4, fsdp=2), devices=devices)
  rule = tiny.optimizer_of(OptimizerConfig())
  make_model = lambda rngs: Transformer(MOE, rngs=rngs)
  state = abstract_state(make_model, rule, mesh=mesh, rules=Rules())
  execution = Execution(mesh=mesh, precision=POLICIES["bf16"], remat="block")
  step = make_train_step(lm_loss(), rule, execution, shardings_of(state))
  batch = {
    name: jax.ShapeDtypeStruct(
      (ROWS, LENGTH),
      np.float32 if name == "loss_weights" else np.int32,
      sharding=batch_sharding(mesh, Rules()),
    )
    for name in tiny.packed_batch()
  }
  lowered = step.on_leaves.lower(jax.tree.leaves(state), batch)
  return lowered.compile().as_text()


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
