"""The kernels, compiled by the TPU's own compiler."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import compile_for
from pallas_kernels.grouped_matmul.op import grouped_matmul

TOPOLOGIES = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"]
# D, F, E: coarse experts and fine ones, either way, and odd sizes.
LAYERS = {
  "coarse, widening": (4096, 14336, 8),
  "coarse, narrowing": (14336, 4096, 8),
  "fine": (2048, 768, 128),
  "odd": (520, 200, 3),
}


def compile_layer(topology: str, M: int, layer: str, dtype):
  """Value and both gradients of one layer."""
  D, F, E = LAYERS[layer]

  def function(x, w, sizes, dout):
    multiply = functools.partial(
      grouped_matmul, operands=jnp.dtype(dtype).name, impl="tpu"
    )
    out, vjp = jax.vjp(lambda x, w: multiply(x, w, sizes), x, w)
    return out, *vjp(dout)

  array = jax.ShapeDtypeStruct
  return compile_for(
    topology,
    function,
    array((M, D), dtype),
    array((E, D, F), jnp.float32),
    array((E,), jnp.int32),
    array((M, F), dtype),
  )


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_and_both_gradients_compile_to_kernels(dtype):
  text = compile_layer("v5e:2x2", 1000, "odd", dtype).as_text()
  assert text.count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("M", [2048, 8192, 32768])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tuned_blocks_fit_every_chip(topology, M, layer, dtype):
  text = compile_layer(topology, M, layer, dtype).as_text()
  assert text.count('custom_call_target="tpu_custom_call"') == 3
