"""Mixtral (arXiv:2401.04088): Mistral with experts."""

from model.config import ModelConfig, Moe, Rope
from model.families import family
from model.families.fields import (
  Fields,
  read_decoder,
  read_rope,
  write_decoder,
  write_rope,
)

_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}."
NAMES = family.HUGGINGFACE_ATTENTION | {
  "layers.moe.router.w": "model.layers.{layer}.block_sparse_moe.gate.weight",
  "layers.moe.gate.w": _EXPERT + "w1.weight",
  "layers.moe.up.w": _EXPERT + "w3.weight",
  "layers.moe.down.w": _EXPERT + "w2.weight",
}


def _read(fields: Fields) -> dict:
  fields.expect("hidden_act", "silu")
  fields.expect("router_jitter_noise", 0.0)
  read_router_loss(fields)
  common = read_decoder(fields)
  window = fields.take("sliding_window", None)
  return common | {
    "rope": read_rope(fields, common["max_positions"]),
    "window": window,
    "layer_pattern": ("global",) if window is None else ("local",),
    "tied": fields.take("tie_word_embeddings", False),
    # Scores of the chosen are divided by their sum.
    "moe": Moe(
      num_experts=fields.take("num_local_experts"),
      num_active=fields.take("num_experts_per_tok"),
    ),
  }


def read_router_loss(fields: Fields) -> None:
  """Reads what says nothing about a finished model.

  Their balance loss is of a whole batch and of all layers at once, so its
  factor is none for `model.moe.balance_loss`.
  """
  fields.take("output_router_logits", None)
  fields.take("router_aux_loss_coef", None)


def experts_of(config: ModelConfig) -> Moe:
  """The experts of a model that is written in a family with experts.

  Raises:
    ValueError: there are none.
  """
  if config.moe is None:
    raise ValueError("this family has experts, and model.moe is None")
  return config.moe


def _write(config: ModelConfig) -> dict:
  moe = experts_of(config)
  return {
    **write_decoder(config),
    **write_rope(config.rope),
    "hidden_act": "silu",
    "sliding_window": config.window,
    "num_local_experts": moe.num_experts,
    "num_experts_per_tok": moe.num_active,
  }


FAMILY = family.Family(
  model_type="mixtral",
  architecture="MixtralForCausalLM",
  names=NAMES,
  read=_read,
  write=_write,
)


def mixtral_8x7b() -> ModelConfig:
  return _mixtral(4096, 32, 32, 14_336, max_positions=32_768)


def mixtral_8x22b() -> ModelConfig:
  return _mixtral(6144, 56, 48, 16_384, max_positions=65_536)


def _mixtral(embed_dim, num_layers, num_heads, mlp_dim, *, max_positions):
  return ModelConfig(
    vocab_size=32_000,
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=mlp_dim,
    max_positions=max_positions,
    rope=Rope(theta=1_000_000.0),
    moe=Moe(num_experts=8, num_active=2),
  )
