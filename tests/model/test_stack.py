"""Rematerialisation: the same function, less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from model.execution import Execution
from model.linear import SAVED_NAME
from model.stack import near_root, scan_layers
from tests.tolerances import tolerance

L, D = 6, 5
MODES = [
  dict(remat="none"),
  dict(remat="none", unroll=4),
  dict(remat="dots"),
  dict(remat="block"),
  dict(remat="block", remat_every=3),
  dict(remat="nested"),
  dict(remat="nested", unroll=2),
]


def step(x, layer):
  """A matmul whose result "dots" keeps, and much else worth keeping."""
  w, index = layer
  y = checkpoint_name(x @ w, SAVED_NAME)
  x = jnp.tanh(jnp.sin(jnp.cos(y) * jnp.sin(2 * y))) + 0.1 * index
  return x, {"index": index, "mean": jnp.mean(x, axis=1)}


def run_all(x, w, execution):
  layers = w, jnp.arange(w.shape[0])
  return scan_layers(step, x, layers, w.shape[0], execution)


def run(x, w, execution):
  return run_all(x, w, execution)[0]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_equals_a_plain_loop(mode):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3, D)).astype("float32")
  w = rng.normal(0, 0.3, (L, D, D)).astype("float32")

  def loop(x, w):
    for i in range(L):
      x, _ = step(x, (w[i], i))
    return jnp.sum(x**2)

  scanned = lambda x, w: jnp.sum(run(x, w, Execution(**mode)) ** 2)
  gradient = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1)))
  both = [gradient(f)(x, w) for f in (scanned, loop)]
  for got, want in zip(*map(jax.tree.leaves, both), strict=True):
    np.testing.assert_allclose(got, want, **tolerance("gradient"))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_collects_in_the_order_of_layers(mode):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3, D)).astype("float32")
  w = rng.normal(0, 0.3, (L, D, D)).astype("float32")
  got = run_all(x, w, Execution(**mode))[1]
  np.testing.assert_array_equal(got["index"], np.arange(L))
  for i in range(L):
    x, want = step(x, (w[i], i))
    np.testing.assert_allclose(got["mean"][i], want["mean"], rtol=1e-5)


def temporary_bytes(num_layers: int, **mode) -> int:
  """Of the compiled gradient by the input: what activations take."""
  x = jax.ShapeDtypeStruct((512, 16), jnp.float32)
  w = jax.ShapeDtypeStruct((num_layers, 16, 16), jnp.float32)
  loss = lambda x, w: jnp.sum(run(x, w, Execution(**mode)))
  compiled = jax.jit(jax.grad(loss)).lower(x, w).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_nested_keeps_the_square_root():
  """16 times the layers: 16 times the inputs kept, or 4 times."""
  growth = lambda **mode: (
    temporary_bytes(256, **mode) / temporary_bytes(16, **mode)
  )
  assert growth(remat="block") > 12
  assert growth(remat="nested") < 5


def test_each_mode_keeps_less_than_nothing_recomputed():
  none = temporary_bytes(64)
  # One value a layer, of the gradient by the input: matmul or input.
  assert temporary_bytes(64, remat="dots") < 0.6 * none
  block = temporary_bytes(64, remat="block")
  assert block < 0.6 * none
  assert temporary_bytes(64, remat="block", remat_every=4) < 0.8 * block


def testnear_root():
  assert [near_root(n) for n in (1, 4, 16, 36, 64)] == [1, 2, 4, 6, 8]
  # Two divisors stand equally near to the root of any other number.
  assert near_root(48) in (6, 8)
  assert near_root(7) in (1, 7)


def test_refuses():
  x, w = jnp.ones((2, D)), jnp.ones((L, D, D))
  with pytest.raises(ValueError, match="remat_every=4 must divide the 6"):
    run(x, w, Execution(remat="block", remat_every=4))
  with pytest.raises(ValueError, match="remat must be .*got 'full'"):
    run(x, w, Execution(remat="full"))
