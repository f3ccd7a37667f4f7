"""Qwen3, dense (arXiv:2505.09388): qk-norm takes the place of biases."""

from model.config import ModelConfig, Rope
from model.families import family
from model.families.fields import Fields
from model.families.qwen2 import read_qwen, write_qwen


def _read(fields: Fields) -> dict:
  attention_bias = fields.take("attention_bias", False)
  return read_qwen(fields, derive_head_dim=False) | {
    "qk_norm": True,
    "qkv_bias": attention_bias,
    "out_bias": attention_bias,
  }


FAMILY = family.Family(
  model_type="qwen3",
  architecture="Qwen3ForCausalLM",
  names=family.HUGGINGFACE,
  read=_read,
  write=lambda config: {
    **write_qwen(config),
    "attention_bias": config.qkv_bias,
  },
  gguf_architecture="qwen3",
  read_gguf=lambda fields, shared: {"qk_norm": True},
)


def qwen3_0_6b() -> ModelConfig:
  return _qwen3(1024, 28, 16, 3072, tied=True)


def qwen3_1_7b() -> ModelConfig:
  return _qwen3(2048, 28, 16, 6144, tied=True)


def qwen3_4b() -> ModelConfig:
  return _qwen3(2560, 36, 32, 9728, tied=True)


def qwen3_8b() -> ModelConfig:
  return _qwen3(4096, 36, 32, 12288)


def qwen3_14b() -> ModelConfig:
  return _qwen3(5120, 40, 40, 17408)


def qwen3_32b() -> ModelConfig:
  return _qwen3(5120, 64, 64, 25600)


def _qwen3(embed_dim, num_layers, num_heads, mlp_dim, *, tied=False):
  return ModelConfig(
    vocab_size=151_936,
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=mlp_dim,
    max_positions=40_960,
    rope=Rope(theta=1_000_000.0),
    norm_eps=1e-6,
    qk_norm=True,
    tied=tied,
  )
