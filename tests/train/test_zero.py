"""ZeRO in the production step: bytes per device, programs, checkpoints.

A stage is judged by what the compiler plans, with weights so large that
nothing else counts: arguments and temporaries of the whole step, with two
micro-batches.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from model.config import ModelConfig, Rope
from pallas_kernels.aot import topology_devices
from sharding.axes import MeshConfig, Rules
from sharding.hlo import collectives
from sharding.mesh import make_mesh
from tests.tolerances import tolerance
from tests.train import programs, tiny
from train import checkpoint
from train.config import OptimizerConfig

RULES = Rules()
# 128 equal layers, nearly all of them feed-forward.
LARGE = ModelConfig(
  vocab_size=256,
  num_layers=128,
  embed_dim=1024,
  num_heads=1,
  num_kv_heads=1,
  head_dim=128,
  mlp_dim=8192,
  max_positions=128,
  rope=Rope(theta=1e4),
)
SMALL = dataclasses.replace(
  LARGE, vocab_size=640, num_layers=3, embed_dim=320, mlp_dim=448
)
# (stage, N) -> bytes of a parameter on a device: parameters, gradients, and
# master weights with moments (arXiv:1910.02054, section 5, figure 1).
FLOAT32 = {
  1: lambda n: 4 + 4 + 8 / n,
  2: lambda n: 4 + 4 / n + 8 / n,
  3: lambda n: 4 / n + 4 / n + 8 / n,
}
MIXED = {
  1: lambda n: 2 + 2 + 12 / n,
  2: lambda n: 2 + 2 / n + 12 / n,
  3: lambda n: 2 / n + 2 / n + 12 / n,
}


def step_of(devices, config, stage, *, master_weights=False, precision):
  """The compiled step over fsdp, and the abstract state."""
  mesh = make_mesh(MeshConfig(fsdp=len(devices)), devices=devices)
  made = programs.make(
    config,
    mesh,
    2 * mesh.size,
    optimizer=OptimizerConfig(master_weights=master_weights),
    precision=precision,
    remat="block",
    loss_chunk=128,
    accumulation=2,
    zero_stage=stage,
  )
  return made.lower().compile(), made.abstract, mesh


def check_bytes(devices, accounting, stage, **settings):
  """What the compiler plans is the accounting, and what is said here."""
  compiled, state, mesh = step_of(devices, LARGE, stage, **settings)
  planned = compiled.memory_analysis()
  count = sum(leaf.size for leaf in jax.tree.leaves(state.model))
  itemsize = jax.tree.leaves(state.model)[0].dtype.itemsize
  n = mesh.size
  bytes_ = planned.argument_size_in_bytes + planned.temp_size_in_bytes
  # The outputs are the arguments, but for the metrics.
  new = planned.output_size_in_bytes - planned.alias_size_in_bytes
  assert new < 1e-4 * bytes_
  want = accounting[stage](n) * count
  # What is no accounting's: whole weights or gradients of three layers
  # (gathered, computed and sent), or a copy of the largest part when it is
  # updated; and the inputs of layers.
  layer = count / LARGE.num_layers * itemsize
  largest = max(leaf.size for leaf in jax.tree.leaves(state.model))
  inputs = LARGE.num_layers * LARGE.max_positions * LARGE.embed_dim * itemsize
  spare = max(3 * layer, largest * itemsize / n) + inputs
  assert spare < 0.15 * want
  if stage == 1:
    # The part of the sum, beside the whole gradients that it is summed from.
    spare += itemsize / n * count
  assert want <= bytes_ <= want + spare, (bytes_ / count, want / count)
  # The stage before would not do, and without any all is held four times.
  before = accounting.get(stage - 1, lambda n: accounting[3](1))
  assert want + spare < before(n) * count


@pytest.mark.parametrize("stage", FLOAT32)
def test_bytes_of_float32_weights(stage):
  """16 / (8 + 8/N), 16 / (4 + 12/N) and 16 / N times fewer than on one."""
  check_bytes(jax.devices(), FLOAT32, stage, precision="float32")


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("stage", FLOAT32)
def test_bytes_on_fewer_devices(stage, num_devices):
  devices = jax.devices()[:num_devices]
  check_bytes(devices, FLOAT32, stage, precision="float32")


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", MIXED)
def test_bytes_of_master_weights(stage):
  """16 / (4 + 12/N), 16 / (2 + 14/N), 16 / N; XLA on a CPU widens bf16."""
  devices = topology_devices("v5p:2x2x2")
  check_bytes(devices, MIXED, stage, master_weights=True, precision="bf16")


@functools.cache
def on_tpu(stage: int):
  """The collectives of a small step, and the weights of a layer's matrices."""
  compiled, state, mesh = step_of(
    topology_devices("v5e:2x4"), SMALL, stage, precision="float32"
  )
  layers = state.model.layers
  matrices = [x for x in jax.tree.leaves(layers) if x.ndim > 2]
  size = sum(x.size for x in matrices) // SMALL.num_layers
  return collectives(compiled.as_text(), mesh), size


def moved(ops, kind: str, *, in_loop: bool) -> int:
  """Elements of the whole arrays, counting every call."""
  return sum(
    op.times * op.num_elements * (op.group_size if "gather" in kind else 1)
    for op in ops
    if op.kind == kind and op.in_loop == in_loop and "fsdp" in op.axes
  )


@pytest.mark.tpu_compiler
def test_stage_2_scatters_gradients_and_gathers_weights_once_a_step():
  ops, layer = on_tpu(2)
  # Every layer of every micro-batch.
  scattered = moved(ops, "reduce-scatter", in_loop=True)
  assert scattered >= 2 * SMALL.num_layers * layer
  gathered = moved(ops, "all-gather", in_loop=True)
  assert layer * SMALL.num_layers <= gathered < 1.2 * layer * SMALL.num_layers


@pytest.mark.tpu_compiler
def test_stage_3_gathers_every_layer_in_both_passes():
  ops, layer = on_tpu(3)
  scattered = moved(ops, "reduce-scatter", in_loop=True)
  assert scattered >= 2 * SMALL.num_layers * layer
  # Two micro-batches, forward and backward.
  gathered = moved(ops, "all-gather", in_loop=True)
  assert gathered >= 4 * SMALL.num_layers * layer


@pytest.mark.tpu_compiler
def test_stage_1_sums_once_a_step():
  ops, layer = on_tpu(1)
  scattered = moved(ops, "reduce-scatter", in_loop=True)
  weights = layer * SMALL.num_layers
  assert 0.9 * weights < scattered < 1.2 * weights
  assert moved(ops, "all-gather", in_loop=True) < 1.2 * weights


@pytest.fixture(scope="module")
def one_device():
  model = tiny.random_model(dataclasses.replace(tiny.GQA, num_layers=2))
  config = OptimizerConfig(eps=1e-4)
  history = tiny.train(model, config, tiny.one_device(), num_steps=1)
  return model, config, history


def test_master_weights_equal_one_device_as_far_as_bf16_goes(one_device):
  model, config, plain = one_device
  config = dataclasses.replace(config, master_weights=True)
  mesh = make_mesh(MeshConfig(data=2, fsdp=4))
  ((state, _), *_) = tiny.train(
    model, config, mesh, num_steps=1, accumulation=2, zero_stage=2
  )
  weights = state.opt_state.weights
  far = tiny.distances(weights, plain[0][0].model)
  assert max(far.values()) < tolerance("gradient", "bfloat16")["rtol"]
  for small, large in zip(
    jax.tree.leaves(state.model), jax.tree.leaves(weights), strict=True
  ):
    assert large.dtype == np.float32
    np.testing.assert_array_equal(small, large.astype(small.dtype))


def test_checkpoints_go_from_stage_to_stage(one_device, tmp_path):
  """Saved by stage 1, restored by 2 and 3, on other meshes, bit for bit."""
  model, config, _ = one_device
  start = lambda mesh, stage: tiny.start(
    model, config, make_mesh(mesh), zero_stage=stage
  )[0]
  state = start(MeshConfig(fsdp=4, tensor=2), 1)
  saver = checkpoint.Saver(tmp_path, keep=1, config={}, start_step=0)
  saver.save(1, state, {})
  saver.close()
  for mesh, stage in [(MeshConfig(data=2, fsdp=4), 2), (MeshConfig(), 3)]:
    like = start(mesh, stage)
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      like,
    )
    restored = checkpoint.restore(tmp_path, 1, shapes).state
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(like)):
      assert ours.sharding == theirs.sharding
