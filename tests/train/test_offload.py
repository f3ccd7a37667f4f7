"""Offload: where bytes stand in the step compiled for a TPU; values here.

A CPU accepts memory kinds and has one memory for all.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from model.execution import Execution
from pallas_kernels.aot import topology_devices
from sharding.arrays import to_global
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from sharding.offload import check_platform
from tests.tolerances import tolerance
from tests.train import programs, tiny
from tests.train.test_zero import LARGE
from train.config import OffloadConfig, OptimizerConfig, StepConfig
from train.objective import lm_loss
from train.step import make_eval_step

RULES = Rules()
NOTHING = OffloadConfig()
CASES = {
  "optimizer": OffloadConfig(optimizer=True),
  "host_update": OffloadConfig(optimizer=True, host_update=True),
  "gradients": OffloadConfig(gradients=True),
  "parameters": OffloadConfig(optimizer=True, gradients=True, parameters=True),
  "activations": OffloadConfig(activations=True),
}


@functools.cache
def planned(offload: OffloadConfig, rows: int):
  """The compiler's plan of a step on v5e:2x4, and parameters of a device."""
  devices = topology_devices("v5e:2x4")
  mesh = make_mesh(MeshConfig(fsdp=8), devices=devices)
  made = programs.make(
    LARGE,
    mesh,
    rows,
    precision="float32",
    remat="block",
    loss_chunk=128,
    accumulation=2,
    offload=offload,
  )
  plan = made.lower().compile().memory_analysis()
  leaves = jax.tree.leaves(made.abstract.model)
  return plan, sum(leaf.size for leaf in leaves) / mesh.size


def check_moved(offload: OffloadConfig, rows: int, moved: float):
  """HBM falls by `moved` bytes, which stand in host memory."""
  plan, count = planned(offload, rows)
  plain, _ = planned(NOTHING, rows)
  on_device = lambda plan: plan.argument_size_in_bytes + plan.temp_size_in_bytes
  assert plain.host_argument_size_in_bytes == plain.host_temp_size_in_bytes == 0
  on_host = plan.host_argument_size_in_bytes + plan.host_temp_size_in_bytes
  fall = on_device(plain) - on_device(plan)
  # Two whole layers on their way.
  spare = 2 * 4 * count * 8 / LARGE.num_layers
  assert moved - spare < fall < moved + spare
  assert on_host > 0.99 * moved


# Bytes of a parameter: two moments; a gradient; weights.
@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
  "name, num_bytes",
  [("optimizer", 8), ("host_update", 8), ("gradients", 4), ("parameters", 16)],
)
def test_bytes_of_the_state_stand_in_host_memory(name, num_bytes):
  _, count = planned(CASES[name], 16)
  check_moved(CASES[name], 16, num_bytes * count)


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_activations_stand_in_host_memory():
  rows = 16 * 32
  of_layer = rows // 16 * LARGE.max_positions * LARGE.embed_dim * 4
  check_moved(CASES["activations"], rows, LARGE.num_layers * of_layer)


@pytest.fixture(scope="module")
def one_device():
  model = tiny.random_model(dataclasses.replace(tiny.GQA, num_layers=2))
  config = OptimizerConfig(eps=1e-4)
  history = tiny.train(model, config, tiny.one_device(), num_steps=2)
  return model, config, history


@pytest.mark.parametrize(
  "name",
  [
    name
    if name in ("host_update", "parameters", "activations")
    else pytest.param(name, marks=pytest.mark.slow)
    for name in CASES
  ],
)
def test_values_are_those_of_one_device_without(one_device, name):
  """With replicas, tensor parallelism, packing and micro-batches."""
  model, config, theirs = one_device
  offload = CASES[name]
  ours = tiny.train(
    model,
    config,
    make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)),
    num_steps=2,
    accumulation=2,
    remat="dots" if name == "activations" else "block",
    offload=offload,
    offload_activations=offload.activations,
  )
  for (state, metrics), (other, wanted) in zip(ours, theirs, strict=True):
    for part, whole in (
      (state.model, other.model),
      (state.opt_state, other.opt_state),
      (metrics, wanted),
    ):
      assert part is metrics or len(jax.tree.leaves(part)) > 10
      far = tiny.distances(part, whole)
      assert max(far.values()) < tolerance("mesh")["rtol"], far


def test_evaluation_streams_parameters(one_device):
  model, config, _ = one_device
  mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
  sums = []
  for offload in (NOTHING, CASES["parameters"]):
    state, _ = tiny.start(model, config, mesh, offload=offload)
    shardings = jax.tree.map(lambda x: x.sharding, state.model)
    evaluate = make_eval_step(lm_loss(), Execution(mesh=mesh), shardings)
    batch = to_global(tiny.packed_batch(), mesh, RULES)
    sums.append(jax.device_get(evaluate(state.model, batch)))
  jax.tree.map(np.testing.assert_array_equal, *sums)


@pytest.mark.slow
def test_master_weights_move_with_the_optimizer(one_device):
  """bfloat16 weights on the device, float32 ones with the moments."""
  model, config, _ = one_device
  config = dataclasses.replace(config, master_weights=True)
  mesh = make_mesh(MeshConfig(fsdp=4))
  results = [
    tiny.train(
      model, config, mesh, num_steps=2, accumulation=2, offload=offload
    )[-1][0]
    for offload in (NOTHING, CASES["host_update"])
  ]
  far = tiny.distances(*[state.opt_state.weights for state in results])
  assert max(far.values()) < tolerance("mesh")["rtol"], far


def test_biases_of_routers_stay_on_the_device():
  moe = dataclasses.replace(tiny.MOE.moe, bias_rate=1e-3)
  model = tiny.random_model(dataclasses.replace(tiny.MOE, moe=moe))
  state, step = tiny.start(
    model, OptimizerConfig(), tiny.one_device(), offload=CASES["parameters"]
  )
  batch = to_global(tiny.packed_batch(), tiny.one_device(), RULES)
  with pytest.raises(ValueError, match=r"bias_rate=0\.001"):
    step(state, batch)


def test_a_platform_without_host_memory_is_refused():
  for platform in ("cpu", "gpu", "tpu"):
    check_platform(platform)
  with pytest.raises(ValueError, match=r"step\.offload.*'metal' has not"):
    check_platform("metal")


@pytest.mark.parametrize(
  "make, parts",
  [
    (lambda: OffloadConfig(parameters=True), ["parameters", "gradients=True"]),
    (lambda: OffloadConfig(host_update=True), ["host_update", "optimizer"]),
    (
      lambda: StepConfig(offload=CASES["parameters"], zero_stage=2),
      ["zero_stage=3", "got 2"],
    ),
    (
      lambda: StepConfig(offload=CASES["activations"], remat="nested"),
      ["remat='block' or 'dots'", "'nested'"],
    ),
  ],
)
def test_settings_that_do_not_fit(make, parts):
  with pytest.raises(ValueError) as error:
    make()
  for part in parts:
    assert part in str(error.value)
