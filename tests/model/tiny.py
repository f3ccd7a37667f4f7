"""Small decoders whose weights are all different from what they start with."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from model.config import ModelConfig, Rope
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


def make(config: ModelConfig = CONFIG, seed: int = 0, **changes) -> Transformer:
  """A model with noise on every weight: scales and biases take part too."""
  config = dataclasses.replace(config, **changes)
  model = Transformer(config, rngs=nnx.Rngs(seed))
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: x + np.float32(0.2) * rng.normal(size=x.shape).astype(np.float32),
    model,
  )


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
  """Random tokens, int32 [rows, length]."""
  rng = np.random.default_rng(seed)
  shape = rows, length
  return rng.integers(0, CONFIG.vocab_size, shape, dtype=np.int32)
