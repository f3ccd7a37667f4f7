"""Qwen3 with experts (arXiv:2505.09388)."""

from model.config import ModelConfig, Moe, Rope
from model.families import family
from model.families.fields import Fields
from model.families.mixtral import experts_of, read_router_loss
from model.families.qwen2 import read_qwen, write_qwen

_EXPERT = "model.layers.{layer}.mlp.experts.{expert}."
NAMES = family.HUGGINGFACE_ATTENTION | {
  "layers.moe.router.w": "model.layers.{layer}.mlp.gate.weight",
  "layers.moe.gate.w": _EXPERT + "gate_proj.weight",
  "layers.moe.up.w": _EXPERT + "up_proj.weight",
  "layers.moe.down.w": _EXPERT + "down_proj.weight",
}


def _read(fields: Fields) -> dict:
  # Layers without experts do not fit into a stack of equal ones.
  fields.expect("decoder_sparse_step", 1)
  fields.expect("mlp_only_layers", [])
  read_router_loss(fields)
  attention_bias = fields.take("attention_bias", False)
  # Transformers 5 writes the one, published files have the other.
  theirs = "num_experts" if "num_experts" in fields else "num_local_experts"
  moe = Moe(
    num_experts=fields.take(theirs),
    num_active=fields.take("num_experts_per_tok"),
    normalize=fields.take("norm_topk_prob"),
  )
  # `intermediate_size` is the width of layers without experts.
  return read_qwen(fields, derive_head_dim=False) | {
    "mlp_dim": fields.take("moe_intermediate_size"),
    "qk_norm": True,
    "qkv_bias": attention_bias,
    "out_bias": attention_bias,
    "moe": moe,
  }


def _write(config: ModelConfig) -> dict:
  moe = experts_of(config)
  return {
    **write_qwen(config),
    "attention_bias": config.qkv_bias,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": config.mlp_dim,
    "num_experts": moe.num_experts,
    "num_experts_per_tok": moe.num_active,
    "norm_topk_prob": moe.normalize,
  }


FAMILY = family.Family(
  model_type="qwen3_moe",
  architecture="Qwen3MoeForCausalLM",
  names=NAMES,
  read=_read,
  write=_write,
)


def qwen3_30b_a3b() -> ModelConfig:
  return _qwen3_moe(2048, 48, 32, 768)


def qwen3_235b_a22b() -> ModelConfig:
  return _qwen3_moe(4096, 94, 64, 1536)


def _qwen3_moe(embed_dim, num_layers, num_heads, mlp_dim):
  return ModelConfig(
    vocab_size=151_936,
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=4,
    head_dim=128,
    mlp_dim=mlp_dim,
    max_positions=40_960,
    rope=Rope(theta=1_000_000.0),
    norm_eps=1e-6,
    qk_norm=True,
    moe=Moe(num_experts=128, num_active=8),
  )
