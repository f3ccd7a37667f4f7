"""A kernel is compiled for a TPU and interpreted everywhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.aot import compile_for
from pallas_kernels.call import pallas_call

X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)


def double(x):
  def kernel(x_ref, out_ref):
    out_ref[...] = 2.0 * x_ref[...]

  return pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    name="double",
  )(x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_is_interpreted_on_a_cpu(wrap):
  np.testing.assert_array_equal(wrap(double)(X), 2 * X)


def test_several_outputs_come_back_as_a_tree():
  def kernel(x_ref, sum_ref, product_ref):
    sum_ref[...] = x_ref[...] + x_ref[...]
    product_ref[...] = x_ref[...] * x_ref[...]

  shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
  outs = pallas_call(kernel, out_shape=[shape, shape])(X)
  np.testing.assert_array_equal(outs[0], 2 * X)
  np.testing.assert_array_equal(outs[1], X * X)


def test_a_grid_bound_may_be_traced():
  """Kernels over ragged data have as many steps as the data asks for."""

  def fill(steps):
    def kernel(out_ref):
      out_ref[...] = jnp.full(out_ref.shape, pl.program_id(0), jnp.float32)

    return pallas_call(
      kernel,
      out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
      grid=(steps,),
      out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
    )()

  np.testing.assert_array_equal(jax.jit(fill)(2)[::8, 0], [0.0, 1.0])
  assert jax.jit(fill)(1)[0, 0] == 0.0


def test_vmap_maps_the_kernel():
  x = np.stack([X, X + 1])
  np.testing.assert_array_equal(jax.vmap(double)(x), 2 * x)


@pytest.mark.tpu_compiler
def test_is_compiled_for_a_tpu_by_a_process_without_one():
  x = jax.ShapeDtypeStruct(X.shape, X.dtype)
  text = compile_for("v5e:2x2", double, x).as_text()
  assert text.count("tpu_custom_call") == 1
  assert "while" not in text  # what the interpreter's grid becomes
