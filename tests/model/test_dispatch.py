"""Rows travel to their experts and back: one device, buffers, ragged."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from model.dispatch import Wire, apply_experts
from sharding.axes import MeshConfig
from sharding.mesh import make_mesh
from sharding.regions import by_device
from tests.tolerances import tolerance

X, N, K, E, D = 4, 5, 2, 8, 3


def scaled(weights_eD):
  """Experts that multiply by a vector; 0 in rows of no expert."""

  def apply(rows_RD, sizes_e):
    ends = jnp.cumsum(sizes_e)
    expert = jnp.searchsorted(ends, jnp.arange(len(rows_RD)), side="right")
    return rows_RD * weights_eD.at[expert].get(mode="fill", fill_value=0)

  return apply


def ragged_all_to_all(
  operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *,
  axis_name,
):  # fmt: skip
  """JAX's, which CPUs lack, as its documentation defines it."""
  gather = functools.partial(jax.lax.all_gather, axis_name=axis_name)
  me, rows = jax.lax.axis_index(axis_name), jnp.arange(len(output))
  operands = gather(operand)
  starts, sizes = gather(input_offsets)[:, me], gather(send_sizes)[:, me]
  targets = gather(output_offsets)[:, me]
  for sender in range(len(starts)):
    offset = rows - targets[sender]
    came = operands[sender].at[starts[sender] + offset].get(mode="clip")
    mine = (offset >= 0) & (offset < recv_sizes[sender])
    output = jnp.where(mine[:, None], came, output)
  # Who receives must expect what is sent.
  return jnp.where(jnp.all(sizes == recv_sizes), output, jnp.nan)


@functools.partial(jax.jit, static_argnames="kind")
def results(x, weights, choices, dy, kind):
  """Output and gradients of all devices' tokens."""

  def run(x, weights):
    if kind == "one device":
      return apply_experts(scaled(weights), x, choices, num_experts=E)
    devices = jax.devices()[:X]
    mesh = make_mesh(MeshConfig(expert=X, fsdp=1), devices=devices)
    wire = Wire(("expert",), bound=N * K, ragged=kind == "ragged")
    local = lambda weights, x, choices: apply_experts(
      scaled(weights), x, choices, num_experts=E, wire=wire
    )
    split = P("expert")
    return by_device(
      local, mesh, in_specs=(split, split, split), out_specs=split
    )(weights, x, choices)

  y, transposed = jax.vjp(run, x, weights)
  return y, *transposed(dy)


def check(seed, none, skew):
  rng = np.random.default_rng(seed)
  # Some experts, or all of one device, get nothing, some everything.
  odds = rng.dirichlet(np.full(E, skew))
  draw = lambda: rng.choice(E, K, replace=False, p=odds * 0.99 + 0.01 / E)
  choices = np.stack([draw() for _ in range(X * N)]).astype(np.int32)
  choices[rng.uniform(size=choices.shape) < none] = E
  x, weights = rng.normal(size=(X * N, D)), rng.normal(size=(E, D))
  dy = rng.normal(size=(X * N, K, D)).astype("float32")
  x, weights = x.astype("float32"), weights.astype("float32")
  whole = np.concatenate([weights, np.zeros((1, D))])[choices]
  want = x[:, None] * whole, np.sum(dy * whole, axis=1)
  for kind in ("one device", "buffers", "ragged"):
    y, dx, dweights = results(x, weights, choices, dy, kind)
    close = tolerance("matmul")
    np.testing.assert_allclose(y, want[0], **close, err_msg=kind)
    np.testing.assert_allclose(dx, want[1], **close, err_msg=kind)
    for e in range(E):
      mine = (x[:, None] * dy)[choices == e].sum(axis=0)
      np.testing.assert_allclose(dweights[e], mine, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
  monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)


@hypothesis.settings(
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
  seed=st.integers(0, 2**30),
  none=st.sampled_from([0.0, 0.3, 1.0]),
  skew=st.sampled_from([0.05, 0.5, 10.0]),
)
def test_equals_a_product_a_choice(seed, none, skew):
  check(seed, none, skew)


@pytest.mark.parametrize("device", range(X))
def test_all_tokens_may_choose_one_device(device):
  """The worst case has room: nothing is dropped."""
  choices = np.tile(np.int32([2 * device, 2 * device + 1]), (X * N, 1))
  x = np.arange(1, X * N * D + 1, dtype=np.float32).reshape(-1, D)
  weights = np.ones((E, D), np.float32)
  dy = np.ones((X * N, K, D), np.float32)
  for kind in ("buffers", "ragged"):
    y, dx, dweights = results(x, weights, choices, dy, kind)
    np.testing.assert_array_equal(y, np.stack([x, x], axis=1))
    np.testing.assert_array_equal(dx, np.full_like(x, K))
    np.testing.assert_allclose(dweights[2 * device], x.sum(axis=0))
