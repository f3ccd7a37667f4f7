"""Norms against float64 transcriptions of the papers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.norms import Norm
from tests.model.tiny import CONFIG
from tests.tolerances import tolerance

D = 12


def random(*shape, seed=0):
  return np.random.default_rng(seed).normal(1.0, 2.0, shape).astype("float32")


def make(**changes) -> Norm:
  """A norm with a random scale and bias; a large eps, so that it shows."""
  config = dataclasses.replace(CONFIG, norm_eps=0.3, **changes)
  norm = Norm(config, rngs=nnx.Rngs(0), embed=D)
  norm.scale[...] = jnp.asarray(random(D, seed=1))
  if norm.bias is not None:
    norm.bias[...] = jnp.asarray(random(D, seed=2))
  return norm


def rms(x):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.3)


def layer(x):
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(
    x.var(-1, keepdims=True) + 0.3
  )


@pytest.mark.parametrize("shape", [(3, 5, D), (2, 3, 4, D)])
def test_closed_forms(shape):
  x = random(*shape)
  scale, bias = np.float64(random(D, seed=1)), np.float64(random(D, seed=2))
  close = lambda norm, want: np.testing.assert_allclose(
    norm(jnp.asarray(x)), want, **tolerance("norm")
  )
  y = np.float64(x)
  close(make(), rms(y) * scale)
  close(make(norm_offset=True), rms(y) * (scale + 1))
  close(make(norm="layer"), layer(y) * scale)
  close(make(norm="layer", norm_bias=True), layer(y) * scale + bias)
  close(make(norm="layer", norm_offset=True), layer(y) * (scale + 1))


def test_starts_as_the_bare_norm():
  x = random(3, D)
  for changes in ({}, {"norm_offset": True}):
    config = dataclasses.replace(CONFIG, norm_eps=0.3, **changes)
    norm = Norm(config, rngs=nnx.Rngs(0), embed=D)
    np.testing.assert_allclose(norm(x), rms(np.float64(x)), **tolerance("norm"))


def test_head_norms_are_rms_whatever_the_model_has():
  config = dataclasses.replace(
    CONFIG, norm="layer", norm_bias=True, norm_eps=0.3
  )
  norm = Norm(config, rngs=nnx.Rngs(0), kind="rms", head_dim=D)
  assert norm.bias is None
  x = random(3, D)
  np.testing.assert_allclose(norm(x), rms(np.float64(x)), **tolerance("norm"))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_bfloat16_is_rounded_once(kind):
  # In bfloat16 a sum of 4096 squares would stop growing at 256.
  x = jnp.asarray(random(2, 4096), jnp.bfloat16)
  config = dataclasses.replace(CONFIG, norm=kind, norm_eps=0.3)
  y = Norm(config, rngs=nnx.Rngs(0), embed=4096)(x)
  assert y.dtype == jnp.bfloat16
  want = {"rms": rms, "layer": layer}[kind](np.float64(x))
  np.testing.assert_allclose(
    np.float64(y), want, **tolerance("elementwise", "bfloat16")
  )
