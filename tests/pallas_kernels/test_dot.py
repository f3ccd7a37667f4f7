"""The matmul in two dtypes of operands."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.dot import dot


def test_casts_operands_and_accumulates_in_float32():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3, 2048)).astype("float32")
  y = rng.normal(size=(2048, 5)).astype("float32")
  for operands in ("float32", "bfloat16"):
    got = dot("TD,DF->TF", x, y, operands)
    assert got.dtype == jnp.float32
    rounded = [np.float64(jnp.asarray(a, operands)) for a in (x, y)]
    # Accumulated in bfloat16, the error would be of order 1.
    np.testing.assert_allclose(got, rounded[0] @ rounded[1], rtol=0, atol=1e-3)
