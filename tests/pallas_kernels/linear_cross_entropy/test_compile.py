"""The real TPU compiler takes the kernels, and what it says of memory."""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import compile_for
from pallas_kernels.linear_cross_entropy import tpu_kernels
from pallas_kernels.linear_cross_entropy.op import (
  linear_cross_entropy,
  linear_log_probs,
)

pytestmark = pytest.mark.tpu_compiler


def compiled(
  topology: str,
  tokens: int,
  D: int,
  V: int,
  *,
  op: str = "cross_entropy",
  head_dtype: str = "float32",
  operands: str = "bfloat16",
  **settings,
):
  """The gradient of a loss, compiled."""
  settings = dict(layout="VD", impl="tpu", operands=operands) | settings
  head = (V, D) if settings["layout"] == "VD" else (D, V)

  def loss(x, head, targets, weights):
    arrays = x, head, targets
    if op == "cross_entropy":
      out = linear_cross_entropy(*arrays, weights, z_loss=1e-4, **settings)
      return out[0]
    out = linear_log_probs(*arrays, weights > 0, **settings)
    return jnp.sum(weights * out.targets)

  return compile_for(
    topology,
    jax.value_and_grad(loss, (0, 1)),
    jax.ShapeDtypeStruct((1, tokens, D), operands),
    jax.ShapeDtypeStruct(head, head_dtype),
    jax.ShapeDtypeStruct((1, tokens), jnp.int32),
    jax.ShapeDtypeStruct((1, tokens), jnp.float32),
  )


def above_inputs_and_outputs(program) -> int:
  """Bytes of HBM at the peak, but for arguments and results."""
  memory = program.memory_analysis()
  around = memory.argument_size_in_bytes + memory.output_size_in_bytes
  return memory.peak_memory_in_bytes - around


def test_kernels_are_compiled():
  """Nothing divides by anything: 1000 tokens, 4.5 x 128 features, 32001."""
  program = compiled("v5e:1x1", 1000, 576, 32001, layout="DV", chunk=512)
  text = program.as_text()
  assert "tpu_custom_call" in text
  for name in (tpu_kernels.FORWARD, tpu_kernels.BACKWARD):
    assert len(re.findall(rf"%{name}[.\d]* = ", text)) == 1
  shapes = set(re.findall(r"\w+\[([\d,]+)\]", text))
  assert "512,32001" in shapes
  assert not {"1000,32001", "1024,32001", "1,1000,32001"} & shapes


@pytest.mark.parametrize("layout", ["VD", "DV"])
def test_memory_of_a_llama_head(layout):
  """At most 0.15 of what all logits take, a head in float32 as it is trained.

  Arguments and results, 4.3 GB here, are the same for both.
  """
  sizes = (8192, 4096, 128256)
  ours = compiled("v5e:1x1", *sizes, layout=layout)
  theirs = compiled("v5e:1x1", *sizes, layout=layout, impl="reference")
  bytes_ours = above_inputs_and_outputs(ours)
  assert bytes_ours <= 0.15 * above_inputs_and_outputs(theirs)
  # The logits of a chunk are nearly all of it.
  assert 1.0 <= bytes_ours / (4 * 1024 * 128256) < 1.05
  # The gradient of the head is summed where it stands.
  copies = re.findall(
    r"= f32\[(?:128256,4096|4096,128256)\]\S* copy\(", ours.as_text()
  )
  assert not copies


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e:1x1", "v5p:2x2x1", "v6e:1x1"])
@pytest.mark.parametrize("tokens", [2048, 8192, 32768])
@pytest.mark.parametrize(
  "head",
  [
    (576, 49152, {}),
    (2048, 128256, dict(layout="DV", head_dtype="bfloat16")),
    (4096, 128256, dict(op="log_probs", soft_cap=30.0)),
    (3584, 152064, dict(layout="DV", op="log_probs")),
    (576, 49153, dict(operands="float32")),
  ],
  ids=str,
)
def test_matrix(chip, tokens, head):
  D, V, settings = head
  program = compiled(chip, tokens, D, V, **settings)
  assert "tpu_custom_call" in program.as_text()
