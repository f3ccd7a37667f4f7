"""Qwen2 and Qwen2.5 (arXiv:2407.10671): biases on queries, keys, values."""

from model.config import ModelConfig, Rope
from model.families import family
from model.families.fields import (
  Fields,
  read_decoder,
  read_rope,
  write_decoder,
  write_rope,
)


def read_qwen(fields: Fields, *, derive_head_dim: bool) -> dict:
  """What Qwen2 and Qwen3 share.

  No published file of either switches its window on.
  """
  fields.expect("hidden_act", "silu")
  fields.expect("use_sliding_window", False)
  fields.take("sliding_window", None)  # both idle: see above
  fields.take("max_window_layers", None)
  fields.expect("use_mrope", False)
  common = read_decoder(fields, derive_head_dim=derive_head_dim)
  fields.expect("layer_types", ["full_attention"] * common["num_layers"])
  return common | {
    "rope": read_rope(fields, common["max_positions"]),
    "tied": fields.take("tie_word_embeddings", False),
  }


def write_qwen(config: ModelConfig) -> dict:
  return {
    **write_decoder(config),
    **write_rope(config.rope),
    "hidden_act": "silu",
    "use_sliding_window": False,
  }


FAMILY = family.Family(
  model_type="qwen2",
  architecture="Qwen2ForCausalLM",
  names=family.HUGGINGFACE,
  read=lambda fields: (
    read_qwen(fields, derive_head_dim=True) | {"qkv_bias": True}
  ),
  write=write_qwen,
  gguf_architecture="qwen2",
  read_gguf=lambda fields, shared: {},
)


def qwen2_0_5b() -> ModelConfig:
  return _qwen2(896, 24, 14, 2, 4864, tied=True)


def qwen2_1_5b() -> ModelConfig:
  return _qwen2(1536, 28, 12, 2, 8960, tied=True)


def qwen2_7b() -> ModelConfig:
  return _qwen2(3584, 28, 28, 4, 18944, vocab_size=152_064)


def qwen2_72b() -> ModelConfig:
  return _qwen2(8192, 80, 64, 8, 29568, vocab_size=152_064, norm_eps=1e-5)


def _qwen2(
  embed_dim, num_layers, num_heads, num_kv_heads, mlp_dim, *,
  vocab_size=151_936, norm_eps=1e-6, tied=False,
):  # fmt: skip
  return ModelConfig(
    vocab_size=vocab_size,
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=embed_dim // num_heads,
    mlp_dim=mlp_dim,
    max_positions=131_072,
    rope=Rope(theta=1_000_000.0),
    norm_eps=norm_eps,
    qkv_bias=True,
    tied=tied,
  )
