"""Gemma 3, the text decoder (arXiv:2503.19786).

Gemma 2 with qk-norm instead of soft-caps, five local layers to a global one,
and another rotary embedding on local layers.
"""

from model.config import ModelConfig, Rope
from model.families import family
from model.families.fields import (
  Fields,
  parse_rope,
  read_rope,
)
from model.families.gemma2 import gemma_constants, read_gemma, write_gemma

PATTERN = ("local",) * 5 + ("global",)
LOCAL_THETA = 10_000.0


def _read(fields: Fields) -> dict:
  # The 270M's file, like all that transformers 5 saves, has the underscore.
  period = fields.take("_sliding_window_pattern", len(PATTERN))
  period = fields.take("sliding_window_pattern", period)
  common = read_gemma(fields, ("local",) * (period - 1) + ("global",))
  # Transformers reads but does not apply soft-caps here.
  for name in ("attn_logit_softcapping", "final_logit_softcapping"):
    fields.expect(name)
  return (
    common | _read_ropes(fields, common["max_positions"]) | {"qk_norm": True}
  )


def _read_ropes(fields: Fields, max_positions: int) -> dict:
  if "rope_parameters" not in fields:
    return {
      "rope": read_rope(fields, max_positions),
      "rope_local": Rope(theta=float(fields.take("rope_local_base_freq"))),
    }
  by_type = Fields(
    fields.take("rope_parameters"), source=f"{fields.source}: rope_parameters"
  )
  ropes = {
    "rope": parse_rope(by_type.take("full_attention"), max_positions, fields),
    "rope_local": parse_rope(
      by_type.take("sliding_attention"), max_positions, fields
    ),
  }
  by_type.finish()
  return ropes


def _write(config: ModelConfig) -> dict:
  values = write_gemma(config)
  if config.rope_local is not None:
    values["rope_local_base_freq"] = config.rope_local.theta
  return values


def _read_gguf(fields: Fields, shared: dict) -> dict:
  # Not in the file: llama.cpp knows the 27B (62 layers) by its depth and the
  # pattern and local base by heart.
  is_27b = shared["num_layers"] == 62
  scalar = (
    shared["embed_dim"] // shared["num_heads"] if is_27b else shared["head_dim"]
  )
  fields.expect("attention.sliding_window_pattern", len(PATTERN))
  return gemma_constants(shared["embed_dim"]) | {
    "attention_scale": scalar**-0.5,
    "window": fields.take("attention.sliding_window"),
    "layer_pattern": PATTERN,
    "rope_local": Rope(
      theta=fields.take("rope.freq_base_swa", LOCAL_THETA),
    ),
    "qk_norm": True,
  }


FAMILY = family.Family(
  model_type="gemma3_text",
  architecture="Gemma3ForCausalLM",
  names=family.HUGGINGFACE_SANDWICH,
  read=_read,
  write=_write,
  gguf_architecture="gemma3",
  read_gguf=_read_gguf,
)


def gemma3_270m() -> ModelConfig:
  return _gemma3(640, 18, 4, 1, 256, 2048, short=True)


def gemma3_1b() -> ModelConfig:
  return _gemma3(1152, 26, 4, 1, 256, 6912, short=True)


def gemma3_4b() -> ModelConfig:
  return _gemma3(2560, 34, 8, 4, 256, 10240)


def gemma3_12b() -> ModelConfig:
  return _gemma3(3840, 48, 16, 8, 256, 15360)


def gemma3_27b() -> ModelConfig:
  return _gemma3(5376, 62, 32, 16, 128, 21504, query_scalar=168)


def _gemma3(
  embed_dim, num_layers, num_heads, num_kv_heads, head_dim, mlp_dim, *,
  query_scalar=256, short=False,
):  # fmt: skip
  """short: text only, 32k positions, window 512; else 128k, scaled, 1024."""
  rope = Rope(theta=1_000_000.0)
  if not short:
    rope = Rope(theta=1_000_000.0, scaling="linear", factor=8.0)
  return ModelConfig(
    # The others' tables hold 64 rows for image tokens too.
    vocab_size=262_144 if short else 262_208,
    num_layers=num_layers,
    embed_dim=embed_dim,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    max_positions=32_768 if short else 131_072,
    rope=rope,
    rope_local=Rope(theta=LOCAL_THETA),
    norm_eps=1e-6,
    window=512 if short else 1024,
    layer_pattern=PATTERN,
    attention_scale=query_scalar**-0.5,
    qk_norm=True,
    **gemma_constants(embed_dim),
  )
