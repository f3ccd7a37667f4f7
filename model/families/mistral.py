"""Mistral 7B (arXiv:2310.06825): a window on every layer in version 0.1."""

from model.config import ModelConfig, Rope
from model.families import family
from model.families.fields import (
  Fields,
  read_decoder,
  read_rope,
  write_decoder,
  write_rope,
)


def _read(fields: Fields) -> dict:
  fields.expect("hidden_act", "silu")
  common = read_decoder(fields)
  # Absent would mean 4096 and null none: too easily confused to guess.
  window = fields.take_nullable("sliding_window")
  return common | {
    "rope": read_rope(fields, common["max_positions"]),
    "window": window,
    "layer_pattern": ("global",) if window is None else ("local",),
    "tied": fields.take("tie_word_embeddings", False),
  }


def _write(config: ModelConfig) -> dict:
  return {
    **write_decoder(config),
    **write_rope(config.rope),
    "hidden_act": "silu",
    "sliding_window": config.window,
  }


FAMILY = family.Family(
  model_type="mistral",
  architecture="MistralForCausalLM",
  names=family.HUGGINGFACE,
  read=_read,
  write=_write,
  # llama.cpp runs Mistral as a Llama, without the window.
  gguf_architecture="llama",
  read_gguf=lambda fields, shared: {},
  gguf_permutes=True,
)


def mistral_7b_v01() -> ModelConfig:
  return _mistral(32_000, theta=10_000.0, window=4096)


def mistral_7b_v02() -> ModelConfig:
  return _mistral(32_000, theta=1_000_000.0, window=None)


def mistral_7b_v03() -> ModelConfig:
  return _mistral(32_768, theta=1_000_000.0, window=None)


def _mistral(vocab_size, *, theta, window):
  return ModelConfig(
    vocab_size=vocab_size,
    num_layers=32,
    embed_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=14336,
    max_positions=32_768,
    rope=Rope(theta=theta),
    window=window,
    layer_pattern=("global",) if window is None else ("local",),
  )
