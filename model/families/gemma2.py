"""Gemma 2 (arXiv:2408.00118).

Norms stored minus one, on both sides of each branch; embeddings times
sqrt(D); soft-caps on scores and logits; local and global layers alternate,
local first.
"""

from model.config import ModelConfig, Rope
from model.families import family
from model.families.fields import (
  Fields,
  read_decoder,
  read_layer_pattern,
  read_rope,
  write_decoder,
  write_layer_types,
  write_rope,
)

PATTERN = ("local", "global")


def read_gemma(fields: Fields, pattern: tuple[str, ...]) -> dict:
  """What Gemma 2 and 3 share: all but soft-caps and rotary embeddings."""
  fields.expect("hidden_activation", "gelu_pytorch_tanh")
  # Gemma 2's files carry it too; transformers reads the other one.
  fields.expect("hidden_act", "gelu_pytorch_tanh")
  fields.expect("use_bidirectional_attention", False)
  common = read_decoder(fields, derive_head_dim=False)
  attention_bias = fields.take("attention_bias", False)
  return (
    common
    | gemma_constants(common["embed_dim"])
    | {
      "window": fields.take("sliding_window"),
      "layer_pattern": read_layer_pattern(
        fields, common["num_layers"], pattern
      ),
      "attention_scale": fields.take("query_pre_attn_scalar") ** -0.5,
      "qkv_bias": attention_bias,
      "out_bias": attention_bias,
      "tied": fields.take("tie_word_embeddings", True),
    }
  )


def gemma_constants(embed_dim: int) -> dict:
  """What every Gemma 2 and 3 has and no file of them says."""
  return {
    "norm_offset": True,
    "norm_placement": "sandwich",
    "activation": "gelu_tanh",
    "embed_scale": embed_dim**0.5,
    "tied": True,
  }


def write_gemma(config: ModelConfig) -> dict:
  scale = config.attention_scale or config.head_dim**-0.5
  return {
    **write_decoder(config),
    **write_rope(config.rope),
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": config.window,
    "layer_types": write_layer_types(config),
    # Transformers wants the whole number that the scale is the root of.
    "query_pre_attn_scalar": round(scale**-2),
    "attention_bias": config.qkv_bias,
  }


def _read(fields: Fields) -> dict:
  common = read_gemma(fields, PATTERN)
  return common | {
    "rope": read_rope(fields, common["max_positions"]),
    # Absent means 50 and 30, null means none.
    "attention_softcap": fields.take_nullable("attn_logit_softcapping"),
    "logit_softcap": fields.take_nullable("final_logit_softcapping"),
  }


def _write(config: ModelConfig) -> dict:
  return write_gemma(config) | {
    "attn_logit_softcapping": config.attention_softcap,
    "final_logit_softcapping": config.logit_softcap,
  }


def _read_gguf(fields: Fields, shared: dict) -> dict:
  # The query scale is not in the file: llama.cpp knows the 27B (46 layers)
  # by its depth, and so must we.
  is_27b = shared["num_layers"] == 46
  scalar = (
    shared["embed_dim"] // shared["num_heads"] if is_27b else shared["head_dim"]
  )
  return gemma_constants(shared["embed_dim"]) | {
    "attention_scale": scalar**-0.5,
    "window": fields.take("attention.sliding_window"),
    "layer_pattern": PATTERN,
    "attention_softcap": fields.take("attn_logit_softcapping"),
    "logit_softcap": fields.take("final_logit_softcapping"),
  }


FAMILY = family.Family(
  model_type="gemma2",
  architecture="Gemma2ForCausalLM",
  names=family.HUGGINGFACE_SANDWICH,
  read=_read,
  write=_write,
  gguf_architecture="gemma2",
  read_gguf=_read_gguf,
)


def gemma2_2b() -> ModelConfig:
  return _gemma2(2304, 26, 8, 4, 256, 9216, query_scalar=256)


def gemma2_9b() -> ModelConfig:
  return _gemma2(3584, 42, 16, 8, 256, 14336, query_scalar=256)


def gemma2_27b() -> ModelConfig:
  return _gemma2(4608, 46, 32, 16, 128, 36864, query_scalar=144)


def _gemma2(
  embed_dim, num_layers, num_heads, num_kv_heads, head_dim, mlp_dim, *,
  query_scalar,
):  # fmt: skip
  return ModelConfig(
    vocab_size=256_000,
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    max_positions=8192,
    rope=Rope(theta=10_000.0),
    norm_eps=1e-6,
    window=4096,
    layer_pattern=PATTERN,
    attention_scale=query_scalar**-0.5,
    attention_softcap=50.0,
    logit_softcap=30.0,
    **gemma_constants(embed_dim),
  )
