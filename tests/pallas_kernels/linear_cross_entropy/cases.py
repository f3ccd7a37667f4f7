"""Inputs of a fixed pool of shapes, and the op ready to call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear_cross_entropy.op import (
  linear_cross_entropy,
  linear_log_probs,
)
from pallas_kernels.linear_cross_entropy.tuning import Blocks

# Small blocks, so that few tokens already make several of each kind.
BLOCKS = Blocks(256, 128, 128, 128, 128, cores=2)
# (B, T, D, V): two chunks and a vocabulary of no whole blocks; whole blocks
# and two slices of features; a single token.
SHAPES = {
  "odd": (2, 150, 24, 300),
  "even": (2, 64, 256, 256),
  "one": (1, 1, 8, 5),
}
# What may be asked of the logits.
HEADS = {
  "VD": dict(layout="VD"),
  "DV": dict(layout="DV"),
  "VD, capped": dict(layout="VD", soft_cap=3.0, scale=0.7),
  "DV, capped": dict(layout="DV", soft_cap=3.0, scale=0.7),
}


def inputs(shape: str, layout: str, scale: float = 1.0, dtype="float32"):
  """x, head, targets, weights, cotangents; one weight in five is 0."""
  B, T, D, V = SHAPES[shape]
  rng = np.random.default_rng(B * T)
  x = scale * rng.normal(size=(B, T, D))
  head = rng.normal(size=(V, D) if layout == "VD" else (D, V))
  weights = rng.uniform(0.2, 2.0, (B, T)) * (rng.random((B, T)) < 0.8)
  return (
    jnp.asarray(x, dtype),
    jnp.asarray(head, dtype),
    jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32),
    jnp.asarray(weights, jnp.float32),
    jnp.asarray(rng.normal(size=(B, T)), jnp.float32),
  )


def _compiled_once(make):
  """A cache that knows settings in any order."""
  cached = functools.cache(make)
  return lambda impl, **settings: cached(impl, **dict(sorted(settings.items())))


@_compiled_once
def cross_entropy(impl: str, **settings):
  """(x, head, targets, weights) -> dict like the oracle's, jitted."""
  settings = dict(impl=impl, blocks=BLOCKS, chunk=256) | settings

  def loss(x, head, weights, targets):
    return linear_cross_entropy(x, head, targets, weights, **settings)

  @jax.jit
  def run(x, head, targets, weights):
    # The cotangent of the loss is then not one.
    both = lambda *args: (lambda out: (3.0 * out[0], out))(loss(*args))
    gradient = jax.value_and_grad(both, (0, 1, 2), has_aux=True)
    (_, (total, parts)), grads = gradient(x, head, weights, targets)
    names = ("dx", "dhead", "dweights")
    # Small numbers come out whole: 3 g / 3 = g but for rounding.
    grads = dict(zip(names, (g / 3 for g in grads), strict=True))
    alone, _ = loss(x, head, weights, targets)
    return dict(loss=total, alone=alone, **parts, **grads)

  return run


@_compiled_once
def log_probs(impl: str, **settings):
  """(x, head, targets, mask, cotangents) -> dict like the oracle's."""
  settings = dict(impl=impl, blocks=BLOCKS, chunk=256) | settings

  @jax.jit
  def run(x, head, targets, mask, g):
    def values(x, head):
      out = linear_log_probs(x, head, targets, mask, **settings)
      return out.targets, out

    _, vjp, out = jax.vjp(values, x, head, has_aux=True)
    dx, dhead = vjp(g)
    return dict(
      values=out.targets, top=out.top, top_ids=out.top_ids, dx=dx, dhead=dhead
    )

  return run
