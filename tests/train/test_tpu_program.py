"""The production step as the TPU's compiler makes it, without a TPU."""

import functools
import re

import jax
import pytest

from model.config import ModelConfig, Rope
from pallas_kernels.aot import topology_devices
from sharding.axes import MeshConfig
from sharding.mesh import make_mesh
from tests.train import programs

pytestmark = pytest.mark.tpu_compiler

# The size of the residual stream occurs in nothing else.
CONFIG = ModelConfig(
  vocab_size=640,
  num_layers=2,
  embed_dim=320,
  num_heads=8,
  num_kv_heads=4,
  head_dim=128,
  mlp_dim=448,
  max_positions=256,
  rope=Rope(theta=1e4),
)
ROWS, LENGTH = 8, 256


@functools.cache
def program() -> str:
  """HLO of a bf16 step with two micro-batches on v5e:2x4, fsdp x tensor."""
  devices = topology_devices("v5e:2x4")
  mesh = make_mesh(MeshConfig(fsdp=4, tensor=2), devices=devices)
  made = programs.make(
    CONFIG, mesh, ROWS, precision="bf16", remat="block", accumulation=2
  )
  return made.lower().compile().as_text()


def test_kernels_are_in_the_program():
  """Chosen by the devices that will run it, not by those of this process."""
  assert jax.default_backend() == "cpu"
  kernels = re.findall(r"%([a-z_]+)[.\d]* = .*tpu_custom_call", program())
  wanted = {"flash_attention_fwd", "flash_attention_bwd", "rotary"}
  assert wanted <= set(kernels)


def test_attention_gathers_nothing():
  """Heads stay where they are: what is gathered are weights and residuals.

  (And the ids of tokens, which are integers.)
  """
  gathered = re.findall(
    r"b?f\d+\[([\d,]+)\]\S* all-gather(?:-start)?\(", program()
  )
  shapes = [tuple(map(int, dims.split(","))) for dims in gathered]
  assert shapes
  for shape in shapes:
    # The stream, or what a part of the table over fsdp=4 gives of it.
    assert {CONFIG.embed_dim, CONFIG.embed_dim // 4} & set(shape), shape
