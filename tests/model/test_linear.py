"""The projection: shapes, names, bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import weights
from model.execution import Execution
from model.linear import Linear
from model.precision import POLICIES
from tests.tolerances import tolerance

B, T, D, N, H = 2, 5, 7, 3, 4


@pytest.mark.parametrize(
  ("equation", "dims", "kept", "x_shape"),
  [
    ("BTD,DNH->BTNH", dict(embed=D, heads=N, head_dim=H), (N, H), (B, T, D)),
    ("BTNH,NHD->BTD", dict(heads=N, head_dim=H, embed=D), (D,), (B, T, N, H)),
  ],
)
def test_product_and_bias(equation, dims, kept, x_shape):
  make = lambda bias: Linear(
    equation, weights.normal(1.0), rngs=nnx.Rngs(0), bias=bias, **dims
  )
  linear = make(True)
  assert linear.w.shape == tuple(dims.values())
  assert linear.w.get_metadata("names") == tuple(dims)
  assert linear.b.shape == kept
  sizes = dict(dims)
  assert tuple(sizes[name] for name in linear.b.get_metadata("names")) == kept

  x = np.random.default_rng(0).normal(size=x_shape).astype("float32")
  plain = np.einsum(equation, np.float64(x), np.float64(linear.w[...]))
  close = lambda got, want: np.testing.assert_allclose(
    got, want, **tolerance("matmul")
  )
  close(linear(x, Execution()), plain)  # The bias starts at zero.
  bias = np.random.default_rng(1).normal(size=kept).astype("float32")
  linear.b[...] = jnp.asarray(bias)
  close(linear(x, Execution()), plain + bias)
  without = make(False)
  assert without.b is None
  close(without(x, Execution()), plain)


def test_bias_under_a_bfloat16_policy():
  linear = Linear(
    "BTD,DF->BTF",
    weights.zeros,
    rngs=nnx.Rngs(0),
    bias=True,
    embed=D,
    mlp=N,
  )
  # 1 + 2 ** -9 is no bfloat16: a bias added in bfloat16 to a product of
  # 1 would be lost; here only the result is rounded.
  linear.b[...] = jnp.full((N,), 1 + 2**-7 + 2**-9)
  y = linear(jnp.ones((B, T, D)), Execution(precision=POLICIES["bf16"]))
  assert y.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.float32(y), np.float32(1 + 2**-7))
  gradient = jax.grad(
    lambda m: m(
      jnp.ones((B, T, D)), Execution(precision=POLICIES["bf16"])
    ).sum()
  )(linear)
  assert gradient.b[...].dtype == gradient.w[...].dtype == jnp.float32
  np.testing.assert_array_equal(gradient.b[...], np.full(N, B * T))
