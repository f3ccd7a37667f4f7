"""Small decoders, no weight of which has the value that it starts with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.config import ModelConfig, Moe, Rope
from model.transformer import Transformer

# No two sizes alike, no size divisible by another's.
CONFIG = ModelConfig(
  vocab_size=37,
  num_layers=3,
  embed_dim=20,
  num_heads=4,
  num_kv_heads=2,
  head_dim=6,
  mlp_dim=28,
  max_positions=64,
  rope=Rope(theta=100.0),
)

MOE = Moe(
  num_experts=7, num_active=3, num_shared=1, scores="sigmoid", bias_rate=0.1
)


def make(config: ModelConfig = CONFIG, seed: int = 0, **changes) -> Transformer:
  """A model filled with noise: scales and biases take part too.

  Drawn by numpy, since compiling an initialiser takes longer than most tests.
  """
  config = dataclasses.replace(config, **changes)
  abstract = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  rng = np.random.default_rng(seed)

  def fill(path, leaf):
    name = jax.tree_util.keystr(path)
    noise = rng.normal(1.0 if "scale" in name else 0.0, 0.25, leaf.shape)
    return jnp.asarray(noise, leaf.dtype)

  return jax.tree_util.tree_map_with_path(fill, abstract)


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
  """Random tokens, int32 [rows, length]."""
  rng = np.random.default_rng(seed)
  shape = rows, length
  return rng.integers(0, CONFIG.vocab_size, shape, dtype=np.int32)
