"""Feed-forward layers against float64 formulas."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx

from model.execution import Execution
from model.mlp import ACTIVATIONS, MLP
from tests.model.tiny import CONFIG
from tests.tolerances import tolerance

erf = np.vectorize(math.erf)
CLOSED_FORMS = {
  "silu": lambda x: x / (1 + np.exp(-x)),
  "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
  "gelu_tanh": lambda x: (
    x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
  ),
  "relu2": lambda x: np.where(x > 0, x, 0) ** 2,
}


@pytest.mark.parametrize("name", sorted(CLOSED_FORMS))
def test_activations(name):
  x = np.linspace(-6, 6, 101, dtype=np.float32)
  np.testing.assert_allclose(
    ACTIVATIONS[name](x),
    CLOSED_FORMS[name](np.float64(x)),
    **tolerance("norm"),
  )


def test_every_activation_has_a_closed_form():
  assert ACTIVATIONS.keys() == CLOSED_FORMS.keys()


@pytest.mark.parametrize("name", sorted(CLOSED_FORMS))
@pytest.mark.parametrize("gated", [True, False])
def test_layer(name, gated):
  config = dataclasses.replace(
    CONFIG, activation=name, gated=gated, mlp_bias=True
  )
  mlp = MLP(config, rngs=nnx.Rngs(0))
  rng = np.random.default_rng(0)
  mlp = jax.tree.map(
    lambda x: x + 0.2 * rng.normal(size=x.shape).astype("float32"), mlp
  )
  assert (mlp.gate is None) == (not gated)
  x = rng.normal(size=(2, 3, config.embed_dim)).astype("float32")
  affine = lambda layer, x: (
    x @ np.float64(layer.w[...]) + np.float64(layer.b[...])
  )
  act = CLOSED_FORMS[name]
  up = affine(mlp.up, np.float64(x))
  hidden = act(affine(mlp.gate, np.float64(x))) * up if gated else act(up)
  want = affine(mlp.down, hidden)
  np.testing.assert_allclose(
    mlp(x, Execution()), want, **tolerance("attention")
  )
