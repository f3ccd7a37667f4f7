"""A head that is split over the vocabulary against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.linear_cross_entropy.op import (
  linear_cross_entropy,
  linear_log_probs,
)
from tests.pallas_kernels.linear_cross_entropy import cases, oracle
from tests.pallas_kernels.linear_cross_entropy.test_op import assert_close

# Rows of the batch on one axis, the vocabulary on two.
MESH = ((2, 2, 2), ("data", "first", "second"))
VOCAB = ("first", "second")
IMPLS = ("reference", "xla", "tpu")


@functools.cache
def mapped(impl: str, op: str, layout: str, **settings):
  """(x, head, targets, rows, g) -> values and gradients, on 8 devices."""
  mesh = jax.make_mesh(*MESH, axis_types=(jax.sharding.AxisType.Auto,) * 3)
  settings |= dict(
    layout=layout, impl=impl, vocab_axis=VOCAB, blocks=cases.BLOCKS
  )
  tokens, head = P("data"), P(VOCAB) if layout == "VD" else P(None, VOCAB)

  def loss(x, head, targets, weights):
    sums = linear_cross_entropy(
      x, head, targets, weights, z_loss=0.1, **settings
    )
    return jax.lax.psum(sums, "data")

  def values(x, head, targets, mask):
    return linear_log_probs(x, head, targets, mask, **settings)

  on_mesh = lambda f, out: jax.shard_map(
    f,
    mesh=mesh,
    in_specs=(tokens, head, tokens, tokens),
    out_specs=out,
    check_vma=False,
  )

  @jax.jit
  def run(x, head, targets, rows, g):
    if op == "log_probs":
      # All of them split by rows; None stays None.
      f = lambda x, head: (lambda y: (y.targets, y))(
        on_mesh(values, tokens)(x, head, targets, rows)
      )
      _, vjp, out = jax.vjp(f, x, head, has_aux=True)
      dx, dhead = vjp(g)
      return dict(
        values=out.targets, top=out.top, top_ids=out.top_ids, dx=dx, dhead=dhead
      )
    f = lambda x, head, rows: (lambda y: (2.0 * y[0], y))(
      on_mesh(loss, P())(x, head, targets, rows)
    )
    (_, (total, parts)), grads = jax.value_and_grad(f, (0, 1, 2), has_aux=True)(
      x, head, rows
    )
    dx, dhead, dweights = (g / 2.0 for g in grads)
    return dict(loss=total, **parts, dx=dx, dhead=dhead, dweights=dweights)

  return run


@pytest.mark.parametrize("layout", ["VD", "DV"])
@pytest.mark.parametrize("impl", IMPLS)
def test_cross_entropy(impl, layout):
  arrays = cases.inputs("odd", layout)
  got = mapped(impl, "cross_entropy", layout)(*arrays)
  want = oracle.cross_entropy(*arrays[:4], layout=layout, z_loss=0.1)
  assert_close(got, want)


@pytest.mark.parametrize("impl", IMPLS)
def test_log_probs(impl):
  x, head, targets, weights, g = cases.inputs("odd", "VD")
  mask = weights > 0.3
  got = mapped(impl, "log_probs", "VD")(x, head, targets, mask, g)
  want = oracle.log_probs(x, head, targets, g * mask, layout="VD")
  want["values"] = np.where(mask, want["values"], 0.0)
  assert_close(got, {k: want[k] for k in ("values", "dx", "dhead")})


@pytest.mark.parametrize("impl", ["reference", "xla"])
# 100 is more than a device holds.
@pytest.mark.parametrize("top_k", [5, 100])
def test_top_k(impl, top_k):
  x, head, targets, _, g = cases.inputs("odd", "DV")
  mask = jnp.ones(targets.shape, bool)
  run = mapped(impl, "log_probs", "DV", top_k=top_k)
  got = run(x, head, targets, mask, g)
  want = cases.log_probs(impl, layout="DV", top_k=top_k)
  want = want(x, head, targets, mask, g)
  np.testing.assert_array_equal(got["top_ids"], want["top_ids"])
  np.testing.assert_allclose(got["top"], want["top"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_large_logits_do_not_overflow_between_devices(impl):
  x, head, targets, weights, g = cases.inputs("odd", "VD", scale=60.0)
  # One device has all the large ones.
  head = head.at[75:].multiply(1e-3)
  arrays = x, head, targets, weights
  got = mapped(impl, "cross_entropy", "VD")(*arrays, g)
  want = oracle.cross_entropy(*arrays, layout="VD", z_loss=0.1)
  np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-4)
  assert all(np.isfinite(got[name]).all() for name in ("dx", "dhead"))
