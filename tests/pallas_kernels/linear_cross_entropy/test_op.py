"""All implementations against float64, value and every gradient."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels.linear_cross_entropy.op import (
  HONOURS,
  linear_cross_entropy,
  linear_log_probs,
)
from tests.pallas_kernels.linear_cross_entropy import cases, oracle
from tests.tolerances import tolerance

IMPLS = ("reference", "xla", "tpu")
CASES = [
  ("odd", "VD"),
  ("odd", "DV, capped"),
  ("even", "VD, capped"),
  ("even", "DV"),
  ("one", "VD"),
]


def assert_close(got, want, dtype="float32"):
  for name, value in want.items():
    kind = "gradient" if name.startswith("d") else "loss"
    got_value = np.asarray(got[name], np.float64)
    bound = dict(tolerance(kind, dtype))
    if kind == "gradient":
      # Entries are of the size of the largest, not of one.
      bound["atol"] *= max(1.0, np.abs(value).max())
    np.testing.assert_allclose(got_value, value, **bound, err_msg=name)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("shape", "head"), CASES)
def test_cross_entropy(impl, shape, head):
  settings = cases.HEADS[head]
  *arrays, _ = cases.inputs(shape, settings["layout"])
  got = cases.cross_entropy(impl, z_loss=0.1, **settings)(*arrays)
  want = oracle.cross_entropy(*arrays, z_loss=0.1, **settings)
  assert_close(got, want)
  np.testing.assert_allclose(got["alone"], got["loss"], **tolerance("loss"))
  assert got["loss"].dtype == got["nll"].dtype == jnp.float32


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("shape", "head"), CASES)
def test_log_probs(impl, shape, head):
  settings = cases.HEADS[head]
  x, head, targets, _, g = cases.inputs(shape, settings["layout"])
  mask = jnp.ones(targets.shape, bool)
  got = cases.log_probs(impl, **settings)(x, head, targets, mask, g)
  want = oracle.log_probs(x, head, targets, g, **settings)
  del want["all"]
  assert_close(got, want)
  assert got["values"].dtype == jnp.float32
  assert got["top"] is got["top_ids"] is None


@pytest.mark.parametrize("head_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_operands(impl, head_dtype):
  """Products of bf16 numbers are exact: only the gradients' factors round."""
  *arrays, _ = cases.inputs("odd", "VD", scale=0.3, dtype="bfloat16")
  arrays[1] = arrays[1].astype(head_dtype)
  run = cases.cross_entropy(impl, layout="VD", operands="bfloat16")
  got = run(*arrays)
  want = oracle.cross_entropy(*arrays, layout="VD")
  assert got["dx"].dtype == jnp.bfloat16
  assert got["dhead"].dtype == head_dtype
  np.testing.assert_allclose(got["loss"], want["loss"], **tolerance("loss"))
  assert_close(got, {k: want[k] for k in ("dx", "dhead")}, "bfloat16")


@pytest.mark.parametrize("impl", ["xla", "tpu"])
def test_optax_agrees(impl):
  x, head, targets, weights, _ = cases.inputs("odd", "VD")

  def theirs(x, head):
    losses = optax.softmax_cross_entropy_with_integer_labels(
      jnp.dot(x, head.T, precision="highest"), targets
    )
    return jnp.sum(weights * losses)

  want, (dx, dhead) = jax.value_and_grad(theirs, (0, 1))(x, head)
  run = cases.cross_entropy(impl, layout="VD")
  got = run(x, head, targets, weights)
  assert_close(got, dict(loss=want, dx=dx, dhead=dhead))


@functools.cache
def plain(layout):
  return cases.inputs("odd", layout)


@st.composite
def rows(draw):
  """Which tokens count, and of the others which are poison."""
  B, T, _, _ = cases.SHAPES["odd"]
  seed, share = draw(st.integers(0, 2**32 - 1)), draw(st.floats(0.0, 1.0))
  rng = np.random.default_rng(seed)
  counts = rng.random((B, T)) < share
  if draw(st.booleans()):
    counts[:, draw(st.integers(0, T)) :] = False
  return counts, ~counts & (rng.random((B, T)) < 0.5)


@pytest.mark.parametrize(("impl", "layout"), [("xla", "DV"), ("tpu", "VD")])
@hypothesis.given(rows())
@hypothesis.settings(max_examples=12)
def test_tokens_without_weight_may_be_anything(impl, layout, drawn):
  counts, poison = drawn
  x, head, targets, weights, g = plain(layout)
  weights = jnp.where(counts, weights + 0.1, 0.0)
  want = oracle.cross_entropy(x, head, targets, weights, layout=layout)
  bad_x = jnp.where(poison[..., None], jnp.nan, x)
  bad_targets = jnp.where(counts, targets, -100)
  run = cases.cross_entropy(impl, layout=layout)
  got = run(bad_x, head, bad_targets, weights)
  assert np.isfinite(got["dweights"]).all()
  # The derivative by a weight of 0 is the loss of the target that was there.
  got["dweights"] = np.where(counts, got["dweights"], want["dweights"])
  assert_close(got, want)
  np.testing.assert_array_equal(got["dx"][~counts], 0.0)

  g = jnp.where(counts, g, jnp.nan)
  run = cases.log_probs(impl, layout=layout)
  got = run(bad_x, head, bad_targets, jnp.asarray(counts), g)
  g = np.where(counts, g, 0.0)
  want = oracle.log_probs(x, head, targets, g, layout=layout)
  want["values"] = np.where(counts, want["values"], 0.0)
  del want["all"]
  assert_close(got, want)
  np.testing.assert_array_equal(got["values"][~counts], 0.0)


@pytest.mark.parametrize("impl", IMPLS)
def test_derivative_by_a_weight_of_zero(impl):
  x, head, targets, weights, _ = plain("VD")
  assert (weights == 0).any()
  run = cases.cross_entropy(impl, layout="VD", z_loss=0.1)
  got = run(x, head, targets, weights)["dweights"]
  want = oracle.cross_entropy(
    x, head, targets, weights, layout="VD", z_loss=0.1
  )
  np.testing.assert_allclose(got, want["dweights"], **tolerance("gradient"))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("target", [-1, 300])
def test_a_target_that_is_no_token_gives_nan(impl, target):
  x, head, targets, weights, g = plain("VD")
  weights = weights.at[0, 1].set(1.0)
  bad = targets.at[0, 1].set(target)
  got = cases.cross_entropy(impl, layout="VD")(x, head, bad, weights)
  assert np.isnan(got["loss"]) and np.isnan(got["dx"][0, 1]).all()
  mask = jnp.ones(targets.shape, bool)
  got = cases.log_probs(impl, layout="VD")(x, head, bad, mask, g)
  assert np.isnan(got["values"]).sum() == 1 and np.isnan(got["values"][0, 1])


@pytest.mark.parametrize("impl", IMPLS)
def test_large_logits(impl):
  *arrays, _ = cases.inputs("odd", "VD", scale=60.0)
  logits = np.einsum("btd,vd->btv", *arrays[:2])
  assert 1000 < np.abs(logits).max() < 3000
  got = cases.cross_entropy(impl, layout="VD", z_loss=1e-4)(*arrays)
  want = oracle.cross_entropy(*arrays, layout="VD", z_loss=1e-4)
  np.testing.assert_allclose(
    got["loss"], want["loss"], **tolerance("attention_large_logits")
  )
  for name in ("dx", "dhead"):
    bound = tolerance("attention_large_logits")
    bound["atol"] *= np.abs(want[name]).max()
    np.testing.assert_allclose(got[name], want[name], **bound)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens_at_all(impl):
  x, head = jnp.zeros((2, 0, 8)), jnp.ones((5, 8))
  targets, weights = jnp.zeros((2, 0), jnp.int32), jnp.zeros((2, 0))
  loss = lambda x, head: linear_cross_entropy(
    x, head, targets, weights, layout="VD", impl=impl
  )[0]
  value, (dx, dhead) = jax.value_and_grad(loss, (0, 1))(x, head)
  assert value == 0 and dx.shape == x.shape
  np.testing.assert_array_equal(dhead, 0.0)


def test_the_first_chunk_reads_no_gradient(monkeypatch):
  """What memory holds before it is written is no zero on a TPU."""
  full = lambda shape, dtype: jnp.full(shape, jnp.nan, dtype)
  monkeypatch.setattr(jax.lax, "empty", full)
  *arrays, _ = cases.inputs("odd", "VD")
  loss = lambda head: linear_cross_entropy(
    arrays[0], head, *arrays[2:], layout="VD", impl="tpu", blocks=cases.BLOCKS
  )[0]
  got = jax.jit(jax.grad(loss))(arrays[1])
  want = oracle.cross_entropy(*arrays, layout="VD")["dhead"]
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("top_k", [1, 7])
def test_top_k(impl, top_k):
  x, head, targets, _, g = plain("DV")
  mask = jnp.ones(targets.shape, bool).at[:, 5].set(False)
  run = cases.log_probs(impl, layout="DV", top_k=top_k)
  got = run(x, head, targets, mask, g)
  want = oracle.log_probs(x, head, targets, g * mask, layout="DV")
  values, ids = jax.lax.top_k(jnp.asarray(want["all"], jnp.float32), top_k)
  close = functools.partial(
    np.testing.assert_allclose, **tolerance("attention")
  )
  close(got["top"], np.where(mask[..., None], values, 0.0))
  np.testing.assert_array_equal(
    got["top_ids"], np.where(mask[..., None], ids, 0)
  )
  want["values"] = np.where(mask, want["values"], 0.0)
  assert_close(got, {k: want[k] for k in ("values", "dx", "dhead")})


def test_parts_have_no_gradient():
  x, head, targets, weights, _ = plain("VD")
  for impl in IMPLS:
    parts = lambda x: linear_cross_entropy(
      x,
      head,
      targets,
      weights,
      layout="VD",
      z_loss=0.1,
      impl=impl,  # noqa: B023
    )[1]
    gradient = jax.jit(jax.grad(lambda x: sum(parts(x).values())))(x)  # noqa: B023
    np.testing.assert_array_equal(gradient, 0.0)


def test_refusals():
  x, head, targets, weights, _ = plain("VD")

  def error(*arrays, match, **settings):
    settings = dict(layout="VD") | settings
    with pytest.raises(ValueError, match=match):
      linear_cross_entropy(*arrays, **settings)

  error(x, head, targets, weights, layout="TV", match="layout must be")
  error(x[0], head, targets, weights, match=r"wanted x \[B, T, D\]")
  error(x, head.T, targets, weights, match="wanted head V, D with D = 24")
  error(x, head, targets[:1], weights, match="wanted integer targets")
  error(x, head, 1.0 * targets, weights, match="wanted integer targets")
  error(x, head, targets, weights[:1], match="wanted weights")
  error(x, head, targets, weights, chunk=0, match="chunk must be at least 1")
  error(x, head, targets, weights, impl="cuda", match="impl of linear_cross")
  place = lambda x, names: x
  error(
    x, head, targets, weights, impl="tpu", shard=place, match="honour shard"
  )
  with pytest.raises(ValueError, match="honour top_k; set impl .*xla"):
    linear_log_probs(x, head, targets, layout="VD", top_k=3, impl="tpu")
  with pytest.raises(ValueError, match="top_k must be in 0..300"):
    linear_log_probs(x, head, targets, layout="VD", top_k=301)
  with pytest.raises(ValueError, match="wanted mask"):
    linear_log_probs(x, head, targets, weights[:1] > 0, layout="VD")


def test_every_implementation_is_in_the_table():
  assert set(HONOURS) == {"reference", "xla", "tpu", "gpu"}
  assert HONOURS["gpu"] == HONOURS["xla"]
