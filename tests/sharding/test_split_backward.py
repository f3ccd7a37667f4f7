"""Gradients in three parts against `jax.vjp`, and their cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from sharding.split_backward import split

L, B, D = 3, 4, 8
NAMES = jax.checkpoint_policies.save_only_these_names("kept")


def layer(x, w, *, shared, factor):
  """Two matmuls with weights of their own, one with a weight of all layers."""
  h = jnp.tanh(jnp.einsum("bd,de->be", x, w["up"]) + w["bias"][None])
  h = checkpoint_name(h, "kept")
  h = jnp.einsum("be,ed->bd", jax.nn.silu(h) * factor, w["down"])
  return x + jnp.einsum("bd,de->be", h, shared)


def network(kind: str):
  """(weights, x, factor) -> (y, loss, aux), layers in a form of `kind`."""

  def function(weights, x, factor):
    one = functools.partial(layer, shared=weights["shared"], factor=factor)
    step = lambda x, w: (one(x, w), jnp.sum(x))
    if kind == "remat":
      step = jax.checkpoint(step, prevent_cse=False)
    if kind == "policy":
      step = jax.checkpoint(step, prevent_cse=False, policy=NAMES)
    if kind == "loop":
      for i in range(L):
        x, _ = step(x, jax.tree.map(lambda w, i=i: w[i], weights["layers"]))
      sums = jnp.zeros(L)
    elif kind == "nested":
      group = lambda w: w.reshape(1, L, *w.shape[1:])
      outer = lambda x, ws: jax.lax.scan(step, x, ws)
      x, sums = jax.lax.scan(outer, x, jax.tree.map(group, weights["layers"]))
    else:
      x, sums = jax.lax.scan(step, x, weights["layers"])
    return x, 0.1 * jnp.sum(jnp.square(x)), {"sums": sums}

  return function


def arrays():
  """Weights (one of them unused), x, the rest, and a gradient of y."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  layers = {
    "up": normal(L, D, 2 * D),
    "bias": normal(L, 2 * D),
    "down": normal(L, 2 * D, D),
  }
  weights = {"layers": layers, "shared": normal(D, D), "unused": normal(3)}
  return weights, normal(B, D), (normal(2 * D)[None],), normal(B, D)


def parts(kind: str):
  """The three parts, each jitted by itself, and what they give."""
  weights, x, rest, dy = arrays()
  found = split(network(kind), weights, x, rest)
  values, saved = jax.jit(found.forward)(weights, x, rest)
  dx, kept = jax.jit(found.backward)(weights, rest, saved, dy)
  dw = jax.jit(found.weight)(weights, rest, saved, kept)
  return found, values, saved, dx, kept, dw


def together(kind: str):
  """The same by autodiff."""
  weights, x, rest, dy = arrays()

  def values(weights, x):
    y, loss, aux = network(kind)(weights, x, *rest)
    return (y, loss), aux

  def both(weights, x, dy):
    (y, loss), vjp, aux = jax.vjp(values, weights, x, has_aux=True)
    return (y, loss, aux), *vjp((dy, jnp.ones(())))

  return both, (weights, x, dy)


@pytest.mark.parametrize("kind", ["scan", "remat", "policy", "loop", "nested"])
def test_parts_make_the_whole(kind):
  _, values, _, dx, _, dw = parts(kind)
  function, args = together(kind)
  want_values, want_dw, want_dx = jax.jit(function)(*args)
  got = jax.tree.leaves((values, dx, dw))
  for a, b in zip(got, jax.tree.leaves((want_values, want_dx, want_dw))):
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)
  assert float(jnp.abs(dw["shared"]).max()) > 0.1


def flops(function, *args) -> float:
  """By the compiler."""
  return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("kind", ["loop", "scan"])
def test_nothing_is_computed_twice(kind):
  """The three cost what both gradients cost, each its share of the matmuls."""
  found, _, saved, _, kept, _ = parts(kind)
  weights, x, rest, dy = arrays()
  cost = (
    flops(found.forward, weights, x, rest),
    flops(found.backward, weights, rest, saved, dy),
    flops(found.weight, weights, rest, saved, kept),
  )
  function, args = together(kind)
  assert sum(cost) < 1.05 * flops(function, *args)
  matmuls = (L if kind == "loop" else 1) * 2 * B * (2 * D * 2 * D + D * D)
  for part in cost:
    assert matmuls <= part < 1.6 * matmuls


def test_no_weight_is_kept():
  """Residuals and cotangents are of tokens: their sizes are multiples of B."""
  _, _, saved, _, kept, _ = parts("scan")
  weights, *_ = arrays()
  shapes = {w.shape for w in jax.tree.leaves(weights)}
  for x in (*saved, *kept):
    assert x.shape not in shapes, x.shape
    assert B in x.shape or x.size < 2 * L, x.shape
