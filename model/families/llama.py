"""Llama 2, 3, 3.1, 3.2 (arXiv:2307.09288, arXiv:2407.21783) and SmolLM2
(arXiv:2502.02737), which is a Llama with other sizes.
"""

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
  # Written into SmolLM2's files; our pairs are Hugging Face's, (i, i + H / 2).
  fields.expect("rope_interleaved", False)
  fields.expect("is_llama_config", True)
  common = read_decoder(fields)
  attention_bias = fields.take("attention_bias", False)
  return common | {
    # Llama 2's files predate the field; the format's default is the paper's.
    "rope": read_rope(fields, common["max_positions"], theta=10_000.0),
    "qkv_bias": attention_bias,
    "out_bias": attention_bias,
    "mlp_bias": fields.take("mlp_bias", False),
    "tied": fields.take("tie_word_embeddings", False),
  }


def _write(config: ModelConfig) -> dict:
  return {
    **write_decoder(config),
    **write_rope(config.rope),
    "hidden_act": "silu",
    "attention_bias": config.qkv_bias,
    "mlp_bias": config.mlp_bias,
  }


FAMILY = family.Family(
  model_type="llama",
  architecture="LlamaForCausalLM",
  names=family.HUGGINGFACE,
  read=_read,
  write=_write,
  gguf_architecture="llama",
  read_gguf=lambda fields, shared: {},
  gguf_permutes=True,
)


def llama2_7b() -> ModelConfig:
  return _llama2(4096, 32, 32, 32, 11008)


def llama2_13b() -> ModelConfig:
  return _llama2(5120, 40, 40, 40, 13824)


def llama2_70b() -> ModelConfig:
  return _llama2(8192, 80, 64, 8, 28672)


def llama3_8b() -> ModelConfig:
  return _llama3(4096, 32, 32, 8, 14336, factor=None)


def llama3_70b() -> ModelConfig:
  return _llama3(8192, 80, 64, 8, 28672, factor=None)


def llama3_1_8b() -> ModelConfig:
  return _llama3(4096, 32, 32, 8, 14336, factor=8.0)


def llama3_1_70b() -> ModelConfig:
  return _llama3(8192, 80, 64, 8, 28672, factor=8.0)


def llama3_1_405b() -> ModelConfig:
  return _llama3(16384, 126, 128, 8, 53248, factor=8.0)


def llama3_2_1b() -> ModelConfig:
  return _llama3(2048, 16, 32, 8, 8192, factor=32.0, tied=True)


def llama3_2_3b() -> ModelConfig:
  return _llama3(3072, 28, 24, 8, 8192, factor=32.0, tied=True)


def smollm2_135m() -> ModelConfig:
  return _smollm2(576, 30, 9, 3, 1536)


def smollm2_360m() -> ModelConfig:
  return _smollm2(960, 32, 15, 5, 2560)


def smollm2_1_7b() -> ModelConfig:
  return _smollm2(2048, 24, 32, 32, 8192, theta=130_000.0)


def _llama2(embed_dim, num_layers, num_heads, num_kv_heads, mlp_dim):
  return ModelConfig(
    vocab_size=32_000,
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=embed_dim // num_heads,
    mlp_dim=mlp_dim,
    max_positions=4096,
    rope=Rope(theta=10_000.0),
  )


def _llama3(
  embed_dim, num_layers, num_heads, num_kv_heads, mlp_dim, *, factor, tied=False
):
  """factor: how far 3.1 and 3.2 stretch the 8192 positions of 3."""
  rope = Rope(theta=500_000.0)
  if factor is not None:
    rope = Rope(
      theta=500_000.0,
      scaling="llama3",
      factor=factor,
      original_max_positions=8192,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
    )
  return ModelConfig(
    vocab_size=128_256,
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=embed_dim // num_heads,
    mlp_dim=mlp_dim,
    max_positions=8192 if factor is None else 131_072,
    rope=rope,
    tied=tied,
  )


def _smollm2(
  embed_dim, num_layers, num_heads, num_kv_heads, mlp_dim, *, theta=100_000.0
):
  return ModelConfig(
    vocab_size=49_152,
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=embed_dim // num_heads,
    mlp_dim=mlp_dim,
    max_positions=8192,
    rope=Rope(theta=theta),
    tied=True,
  )
