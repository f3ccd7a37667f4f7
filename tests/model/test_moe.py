"""The mixture of experts against numpy, token by token."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.attention import View
from model.config import Moe
from model.execution import Execution
from model.moe import MoE
from model.precision import POLICIES
from tests.model import moe_oracle
from tests.model.tiny import CONFIG
from tests.tolerances import tolerance

B, T, D, F = 3, 11, 6, 7
LOSSES = dict(balance_loss=0.7, z_loss=0.3)
CASES = {
  "mixtral": (Moe(num_experts=5, num_active=2, **LOSSES), "silu"),
  "deepseek": (
    Moe(
      num_experts=8,
      num_active=3,
      num_shared=2,
      scores="sigmoid",
      scale=2.5,
      bias_rate=0.1,
      **LOSSES,
    ),
    "silu",
  ),
  "switch": (
    Moe(
      num_experts=4,
      num_active=1,
      normalize=False,
      capacity_factor=0.8,
      **LOSSES,
    ),
    "relu2",
  ),
  "gshard": (
    Moe(
      num_experts=4, num_active=2, capacity_factor=0.7, bias_rate=0.0, **LOSSES
    ),
    "silu",
  ),
  "all": (
    Moe(num_experts=3, num_active=3, scores="sigmoid", normalize=False),
    "silu",
  ),
}


@functools.cache
def abstract(case: str):
  """The layer without weights."""
  moe, activation = CASES[case]
  config = dataclasses.replace(
    CONFIG,
    embed_dim=D,
    mlp_dim=F,
    moe=moe,
    activation=activation,
    gated=activation == "silu",
  )
  return jax.eval_shape(lambda: MoE(config, rngs=nnx.Rngs(0)))


def drawn(case: str, seed: int, empty: int) -> MoE:
  """A layer of noise, in which the first `empty` experts are not liked."""
  rng = np.random.default_rng(seed)
  draw = lambda leaf: rng.normal(0, 0.5, leaf.shape).astype("float32")
  layer = jax.tree.map(draw, abstract(case))
  # Every token has a 1 as its first feature.
  layer.router.w[...][0, :empty] = -9
  return layer


def weights_of(layer: MoE) -> dict:
  """As the oracle calls them, float64."""
  get = lambda x: None if x is None else np.float64(x.w[...])
  three = lambda x: {name: get(getattr(x, name)) for name in FEED}
  bias = layer.router.bias
  return three(layer) | {
    "router": get(layer.router),
    "bias": None if bias is None else np.float64(bias[...]),
    "shared": None if layer.shared is None else three(layer.shared),
  }


FEED = ("gate", "up", "down")


def inputs(seed: int, padding: float):
  """x with NaN in padding, segments, and numbers of shuffled tokens."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(B, T, D)).astype("float32")
  x[..., 0] = 1
  segments = np.int32(rng.uniform(size=(B, T)) >= padding)
  x[segments == 0] = np.nan
  numbers = rng.permuted(np.tile(np.arange(T), (B, 1)), axis=1)
  return x, segments, numbers.astype(np.int32)


@functools.partial(jax.jit, static_argnames="impl")
def ours(layer, x, segments, numbers, cotangents, impl="auto"):
  """Output, statistics, and gradients of a sum of both."""

  def total(layer, x):
    # There is one segment: numbers follow its positions.
    view = View((), numbers, segments)
    y, stats = layer(x, view, Execution(experts=impl))
    dy, dr = cotangents
    real = segments[..., None] != 0
    sum_ = jnp.sum(jnp.where(real, y * dy, 0)) + dr @ stats["router_loss_B"]
    return sum_, (y, stats)

  grad = jax.grad(total, argnums=(0, 1), has_aux=True)
  (dlayer, dx), out = grad(layer, x)
  return *out, dlayer, dx


def check(case: str, seed: int, padding: float, empty: int, impl="auto"):
  """Values, statistics and derivatives."""
  (moe, activation), layer = CASES[case], drawn(case, seed, empty)
  x, segments, numbers = inputs(seed, padding)
  rng = np.random.default_rng(seed + 1)
  cotangents = rng.normal(size=x.shape), rng.normal(size=B)
  cotangents = jax.tree.map(np.float32, cotangents)
  y, stats, dlayer, dx = ours(layer, x, segments, numbers, cotangents, impl)

  real = segments != 0
  x = np.where(real[..., None], x, 0).astype(np.float64)
  weights = weights_of(layer)
  run = lambda w, x: moe_oracle.layer(w, x, segments, numbers, moe, activation)
  want, wanted = run(weights, x)
  np.testing.assert_allclose(y, want.real, **tolerance("attention"))
  assert stats.keys() == wanted.keys()
  for name, value in stats.items():
    close = tolerance("attention")
    np.testing.assert_allclose(value, wanted[name].real, **close, err_msg=name)

  # A derivative in a random direction of each array.
  def derivative(weights, x):
    y, stats = run(weights, x)
    sum_ = np.sum(y * cotangents[0]) + cotangents[1] @ stats["router_loss_B"]
    return sum_.imag / 1e-30

  gradients = jax.tree.map(np.float64, weights_of(dlayer))
  leaves, tree = jax.tree.flatten(weights)
  scale = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradients)))
  for i, got in enumerate(jax.tree.leaves(gradients)):
    way = rng.normal(size=got.shape)
    moved = list(leaves)
    moved[i] = leaves[i] + 1e-30j * way
    # The choice compares real numbers: of a bias it has no derivative.
    if leaves[i] is weights["bias"]:
      np.testing.assert_array_equal(got, 0)
      continue
    want = derivative(jax.tree.unflatten(tree, moved), x)
    np.testing.assert_allclose(
      np.sum(got * way), want, rtol=1e-4, atol=1e-5 * scale
    )
  way = rng.normal(size=x.shape) * real[..., None]
  want = derivative(weights, x + 1e-30j * way)
  np.testing.assert_array_equal(np.where(real[..., None], 0, dx), 0)
  np.testing.assert_allclose(
    np.sum(np.where(real[..., None], dx, 0) * way),
    want,
    rtol=1e-4,
    atol=1e-5 * scale,
  )
  return stats


@hypothesis.settings(max_examples=25)
@hypothesis.given(
  case=st.sampled_from(sorted(CASES)),
  seed=st.integers(0, 2**30),
  padding=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
  empty=st.integers(0, 2),
)
def test_equals_a_loop_over_tokens(case, seed, padding, empty):
  check(case, seed, padding, empty)


def test_cases_drop_and_leave_experts_empty():
  """Or the test above would not show that it is right to."""
  stats = check("gshard", 0, 0.0, 1)
  assert stats["dropped_B"].sum() > 0
  assert (stats["counts_BE"].sum(axis=0) == 0).any()


@pytest.mark.parametrize("policy", ["bf16", "bf16_operands"])
def test_choices_are_those_of_float32_in_bf16(policy):
  """Operands are rounded, the router is not."""
  precision = POLICIES[policy]
  layer = drawn("mixtral", 0, 0)
  x, segments, numbers = inputs(0, 0.3)
  view = View((), numbers, segments)

  @jax.jit
  def run(layer, x):
    return layer(x, view, Execution(precision=precision))

  x_rounded = jnp.asarray(x, "bfloat16")
  y, stats = run(layer, x_rounded.astype(precision.activations))
  assert y.dtype == precision.activations
  x = np.nan_to_num(np.float64(x_rounded))
  want, wanted = moe_oracle.layer(
    weights_of(layer), x, segments, numbers, *CASES["mixtral"]
  )
  np.testing.assert_array_equal(stats["counts_BE"], wanted["counts_BE"])
  np.testing.assert_allclose(
    stats["z_B"], wanted["z_B"].real, **tolerance("attention")
  )
  close = tolerance("attention", "bfloat16")
  np.testing.assert_allclose(np.float32(y), want.real, **close)


def test_the_kernel_equals_a_loop_over_tokens():
  check("deepseek", 1, 0.3, 1, impl="tpu")


def test_a_cache_has_no_limit():
  """What a row held before is not known, so nothing is dropped."""
  layer = drawn("gshard", 0, 1)
  x, segments, numbers = inputs(0, 0.0)
  view = View((), numbers, segments)
  run = jax.jit(lambda view: layer(x, view, Execution())[1])
  dropped = lambda view: run(view)["dropped_B"].sum()
  assert dropped(view) > 0
  assert dropped(view._replace(cached=numbers)) == 0
