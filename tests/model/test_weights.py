"""What is declared with a weight: names, shape, initial values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import weights
from model.config import ModelConfig
from model.transformer import Transformer
from sharding.axes import Rules
from tests.model.tiny import CONFIG

FULL = dict(
  norm="layer",
  norm_bias=True,
  norm_placement="sandwich",
  qk_norm=True,
  qkv_bias=True,
  out_bias=True,
  mlp_bias=True,
)
# Large enough that a standard deviation is known to 2 %.
WIDE = dataclasses.replace(
  CONFIG,
  vocab_size=301,
  embed_dim=64,
  num_heads=6,
  num_kv_heads=3,
  head_dim=16,
  mlp_dim=80,
)


def named(model) -> dict[str, nnx.Variable]:
  flat, _ = jax.tree_util.tree_flatten_with_path(
    model, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  keystr = jax.tree_util.keystr
  return {keystr(path, simple=True, separator="."): x for path, x in flat}


def sizes(config: ModelConfig) -> dict[str, int]:
  return dict(
    vocab=config.vocab_size,
    embed=config.embed_dim,
    heads=config.num_heads,
    kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    mlp=config.mlp_dim,
  )


def test_every_weight_names_its_dims():
  config = dataclasses.replace(CONFIG, **FULL)
  model = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  known = {field.name for field in dataclasses.fields(Rules)}
  tree = named(model)
  assert len(tree) == 28
  for path, param in tree.items():
    assert isinstance(param, nnx.Param), path
    assert param.dtype == jnp.float32, path
    names = param.get_metadata("names")
    assert known.issuperset(names), path
    shape = tuple(sizes(config)[name] for name in names)
    stacked = (config.num_layers,) if path.startswith("layers.") else ()
    assert param.shape == stacked + shape, path


@pytest.fixture(scope="module")
def draw():
  """From a key, a model."""
  config = dataclasses.replace(WIDE, **FULL)
  return jax.jit(lambda key: Transformer(config, rngs=nnx.Rngs(key)))


@pytest.fixture(scope="module")
def model(draw):
  return draw(jax.random.key(0))


def test_initial_spread(model):
  D, NH, F, L = 64, 6 * 16, 80, 3
  std = {
    "embed.table": 0.02,
    "head.w": D**-0.5,
    "layers.attention.q.w": D**-0.5,
    "layers.attention.k.w": D**-0.5,
    "layers.attention.v.w": D**-0.5,
    "layers.attention.out.w": (NH * 2 * L) ** -0.5,
    "layers.mlp.gate.w": D**-0.5,
    "layers.mlp.up.w": D**-0.5,
    "layers.mlp.down.w": (F * 2 * L) ** -0.5,
  }
  for path, param in named(model).items():
    value = np.asarray(param[...])
    if path in std:
      # Five standard deviations of the estimates.
      error = 5 * std[path] / value.size**0.5
      assert abs(value.mean()) < error, path
      assert abs(value.std() - std[path]) < error / 2**0.5, path
    else:
      start = 1.0 if path.endswith("scale") else 0.0
      np.testing.assert_array_equal(value, start, err_msg=path)


def test_no_two_weights_are_drawn_alike(model):
  w = model.layers.attention.q.w[...], model.layers.mlp.up.w[...]
  first, second = (np.asarray(x).reshape(3, 64, -1) for x in w)
  alike = lambda a, b: abs(np.corrcoef(a.ravel(), b.ravel())[0, 1])
  assert alike(first[0], first[1]) < 0.1
  assert alike(first[1], first[2]) < 0.1
  assert alike(first[0][:, :80], second[0][:, :80]) < 0.1


def test_a_seed_gives_the_same_weights(model, draw):
  same, other = draw(jax.random.key(0)), draw(jax.random.key(1))
  for path, param in named(model).items():
    np.testing.assert_array_equal(param[...], named(same)[path][...], path)
  assert np.abs(other.embed.table[...] - model.embed.table[...]).max() > 0.02


def test_fan_in():
  draw = weights.fan_in(25, branches=4)(
    jax.random.key(0), (100, 100), jnp.float32
  )
  assert float(draw.std()) == pytest.approx(0.1, rel=0.05)
