"""Every family against logits recorded from transformers.

tests/oracles/record_families.py made the recordings;
tests/oracles/test_families_live.py repeats them where torch is there.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import ModelConfig, Rope
from model.families import registry
from model.formats import weights_map
from tests.oracles import family_cases
from tests.oracles.named_checkpoint import NamedCheckpoint
from tests.tolerances import tolerance

RECORDED = pathlib.Path(__file__).parent / "recorded"

# Case -> what to change so that one feature of the family is gone. "logits"
# must then be wrong, or the recording does not exercise the feature.
FEATURES = {
  "llama3": {"rope scaling": {"rope": Rope(theta=500.0)}},
  "llama_bias": {
    "qkv bias": {"qkv_bias": False},
    "out bias": {"out_bias": False},
    "mlp bias": {"mlp_bias": False},
  },
  "mistral": {"window": {"layer_pattern": ("global",)}},
  "qwen2": {
    "qkv bias": {"qkv_bias": False},
    "rope scaling": {"rope": Rope(theta=1000.0)},
  },
  "qwen3": {
    "qk norm": {"qk_norm": False},
    "rope scaling": {"rope": Rope(theta=1000.0)},
    "yarn beta fast": {"rope.beta_fast": 32.0},
    "yarn beta slow": {"rope.beta_slow": 1.0},
    "yarn attention factor": {"rope.attention_factor": None},
    "yarn truncate": {"rope.truncate": True},
  },
  "mixtral": {
    "window": {"layer_pattern": ("global",)},
    "experts a token": {"moe.num_active": 1},
    "normalised scores": {"moe.normalize": False},
  },
  "qwen3_moe": {
    "qk norm": {"qk_norm": False},
    "experts a token": {"moe.num_active": 2},
    "scores as they are": {"moe.normalize": True},
  },
  "gemma2": {
    "window": {"layer_pattern": ("global",)},
    "local first": {"layer_pattern": ("global", "local")},
    "attention softcap": {"attention_softcap": None},
    "logit softcap": {"logit_softcap": None},
    "norm offset": {"norm_offset": False},
    "embed scale": {"embed_scale": 1.0},
    "query scale": {"attention_scale": None},
    "sandwich norms": {"norm_placement": "pre"},
    "gelu": {"activation": "silu"},
  },
  "gemma3": {
    "window": {"window": family_cases.LENGTH},
    "pattern": {"layer_pattern": ("local",) * 6 + ("global",)},
    "local rope": {"rope_local": None},
    "rope scaling": {"rope": Rope(theta=1_000_000.0)},
    "qk norm": {"qk_norm": False},
    "norm offset": {"norm_offset": False},
    "embed scale": {"embed_scale": 1.0},
    "query scale": {"attention_scale": None},
    "sandwich norms": {"norm_placement": "pre"},
  },
}
SWITCHES = [
  pytest.param(case, change, id=f"{case}-{feature}")
  for case, features in FEATURES.items()
  for feature, change in features.items()
]


def config_of(case: str) -> ModelConfig:
  values = family_cases.CONFIGS[case]
  return registry.find(values["model_type"]).config(values)


def change(config: ModelConfig, what: dict) -> ModelConfig:
  """`dataclasses.replace`, "rope.x" reaching into the rotary embedding."""
  for name, value in what.items():
    if "." in name:
      part, name = name.split(".")
      value = dataclasses.replace(getattr(config, part), **{name: value})
      name = part
    config = dataclasses.replace(config, **{name: value})
  return config


@functools.cache
def recorded(case: str) -> dict[str, np.ndarray]:
  with np.load(RECORDED / f"{case}.npz") as file:
    return dict(file)


def logits(case: str, config: ModelConfig) -> np.ndarray:
  """Ours at real tokens, from the case's weights, under any config."""
  names = registry.find(family_cases.CONFIGS[case]["model_type"]).names
  source = NamedCheckpoint(case)
  # A feature that is switched off leaves its weights unused.
  unused = source.names() if config != config_of(case) else frozenset()
  model = weights_map.load(config, names, source, ignored=unused)
  batch = recorded(case)

  @jax.jit
  def run(model, tokens, positions, segment_ids):
    hidden = model(tokens, positions=positions, segment_ids=segment_ids)
    return model.logits(hidden)

  inputs = (batch[k] for k in ("tokens", "positions", "mask"))
  result = run(model, *map(jnp.asarray, inputs))
  return np.asarray(result)[batch["mask"] == 1]


@pytest.mark.parametrize("case", family_cases.CONFIGS)
def test_logits_equal_recorded(case):
  ours = logits(case, config_of(case))
  np.testing.assert_allclose(
    ours, recorded(case)["logits"], **tolerance("logits_parity")
  )


@pytest.mark.parametrize(("case", "what"), SWITCHES)
def test_each_feature_matters(case, what):
  config = change(config_of(case), what)
  assert config != config_of(case)
  ours = logits(case, config)
  worst = np.abs(ours - recorded(case)["logits"]).max()
  assert worst > 100 * tolerance("logits_parity")["atol"]


@pytest.mark.parametrize("case", family_cases.CONFIGS)
def test_cases_are_hard(case):
  config, batch = config_of(case), recorded(case)
  assert config.vocab_size % 2 == 1
  assert config.num_heads > config.num_kv_heads
  assert config.head_dim != config.embed_dim / config.num_heads
  assert config.window is None or config.window < family_cases.LENGTH
  original = config.rope.original_max_positions
  assert original is None or original < family_cases.LENGTH
  left, right = batch["mask"][:, 0] == 0, batch["mask"][:, -1] == 0
  assert left.any() and right.any() and not (left & right).any()
