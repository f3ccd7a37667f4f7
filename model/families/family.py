"""A family: how its checkpoints call what our decoder has. No forward code.

Name maps go from our path to theirs, "{layer}" being the number of a layer and
"{expert}" that of an expert.
Both formats store a matrix as [outputs, inputs] and know no heads; ours is
[inputs, outputs] with heads apart. That is the same for every matrix, so maps
hold names only (`model/formats/weights_map.py` turns the arrays).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from model.config import ModelConfig
from model.families.fields import Fields

# Hugging Face names of a pre-norm decoder; sandwich norms are named anew.
HUGGINGFACE = {
  "embed.table": "model.embed_tokens.weight",
  "layers.attention_norm.scale": "model.layers.{layer}.input_layernorm.weight",
  "layers.attention.q.w": "model.layers.{layer}.self_attn.q_proj.weight",
  "layers.attention.q.b": "model.layers.{layer}.self_attn.q_proj.bias",
  "layers.attention.k.w": "model.layers.{layer}.self_attn.k_proj.weight",
  "layers.attention.k.b": "model.layers.{layer}.self_attn.k_proj.bias",
  "layers.attention.v.w": "model.layers.{layer}.self_attn.v_proj.weight",
  "layers.attention.v.b": "model.layers.{layer}.self_attn.v_proj.bias",
  "layers.attention.q_norm.scale":
    "model.layers.{layer}.self_attn.q_norm.weight",
  "layers.attention.k_norm.scale":
    "model.layers.{layer}.self_attn.k_norm.weight",
  "layers.attention.out.w": "model.layers.{layer}.self_attn.o_proj.weight",
  "layers.attention.out.b": "model.layers.{layer}.self_attn.o_proj.bias",
  "layers.mlp_norm.scale":
    "model.layers.{layer}.post_attention_layernorm.weight",
  "layers.mlp.gate.w": "model.layers.{layer}.mlp.gate_proj.weight",
  "layers.mlp.gate.b": "model.layers.{layer}.mlp.gate_proj.bias",
  "layers.mlp.up.w": "model.layers.{layer}.mlp.up_proj.weight",
  "layers.mlp.up.b": "model.layers.{layer}.mlp.up_proj.bias",
  "layers.mlp.down.w": "model.layers.{layer}.mlp.down_proj.weight",
  "layers.mlp.down.b": "model.layers.{layer}.mlp.down_proj.bias",
  "final_norm.scale": "model.norm.weight",
  "head.w": "lm_head.weight",
}  # fmt: skip

# Gemma 2 and 3: what is "post_attention" above is here a sandwich norm.
HUGGINGFACE_SANDWICH = HUGGINGFACE | {
  "layers.attention_post_norm.scale":
    "model.layers.{layer}.post_attention_layernorm.weight",
  "layers.mlp_norm.scale":
    "model.layers.{layer}.pre_feedforward_layernorm.weight",
  "layers.mlp_post_norm.scale":
    "model.layers.{layer}.post_feedforward_layernorm.weight",
}  # fmt: skip

# Without a dense feed-forward; what it is called differs.
HUGGINGFACE_ATTENTION = {
  path: name
  for path, name in HUGGINGFACE.items()
  if not path.startswith("layers.mlp.")
}

# GGUF has one name for a role in all architectures.
GGUF = {
  "embed.table": "token_embd.weight",
  "layers.attention_norm.scale": "blk.{layer}.attn_norm.weight",
  "layers.attention.q.w": "blk.{layer}.attn_q.weight",
  "layers.attention.q.b": "blk.{layer}.attn_q.bias",
  "layers.attention.k.w": "blk.{layer}.attn_k.weight",
  "layers.attention.k.b": "blk.{layer}.attn_k.bias",
  "layers.attention.v.w": "blk.{layer}.attn_v.weight",
  "layers.attention.v.b": "blk.{layer}.attn_v.bias",
  "layers.attention.q_norm.scale": "blk.{layer}.attn_q_norm.weight",
  "layers.attention.k_norm.scale": "blk.{layer}.attn_k_norm.weight",
  "layers.attention.out.w": "blk.{layer}.attn_output.weight",
  "layers.attention.out.b": "blk.{layer}.attn_output.bias",
  "layers.attention_post_norm.scale": "blk.{layer}.post_attention_norm.weight",
  "layers.mlp_norm.scale": "blk.{layer}.ffn_norm.weight",
  "layers.mlp.gate.w": "blk.{layer}.ffn_gate.weight",
  "layers.mlp.gate.b": "blk.{layer}.ffn_gate.bias",
  "layers.mlp.up.w": "blk.{layer}.ffn_up.weight",
  "layers.mlp.up.b": "blk.{layer}.ffn_up.bias",
  "layers.mlp.down.w": "blk.{layer}.ffn_down.weight",
  "layers.mlp.down.b": "blk.{layer}.ffn_down.bias",
  "layers.mlp_post_norm.scale": "blk.{layer}.post_ffw_norm.weight",
  "final_norm.scale": "output_norm.weight",
  "head.w": "output.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """What the importers and exporters need to know.

  Attributes:
    model_type: of config.json.
    architecture: the class that transformers builds.
    names: our path -> Hugging Face name.
    read: fields of config.json -> arguments of ModelConfig.
    write: the inverse.
    gguf_architecture: `general.architecture` of its GGUF files; None: they are
      not read.
    read_gguf: arguments that GGUF files of this architecture add to those
      that all share, from their fields and the shared arguments.
    gguf_permutes: rows of q and k are interleaved for llama.cpp's rotary
      embedding.
  """

  model_type: str
  architecture: str
  names: Mapping[str, str]
  read: Callable[[Fields], dict[str, Any]]
  write: Callable[[ModelConfig], dict[str, Any]]
  gguf_architecture: str | None = None
  read_gguf: Callable[[Fields, dict[str, Any]], dict[str, Any]] | None = None
  gguf_permutes: bool = False

  def config(self, values: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes.

    Raises:
      ValueError: a field is missing, unknown, or asks for what the decoder
        does not do.
    """
    fields = Fields(values, source=f"config.json of {self.model_type!r}")
    fields.expect("model_type", self.model_type)
    arguments = self.read(fields)
    fields.finish()
    return ModelConfig(**arguments)

  def config_json(self, config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, which reads back as the same model.

    Raises:
      ValueError: transformers has no way to say this in this family.
    """
    config = _finished(config)
    values = {
      "architectures": [self.architecture],
      "model_type": self.model_type,
      **self.write(config),
    }
    said = self.config(values)
    wrong = [
      f"model.{field.name}={getattr(config, field.name)!r} would become"
      f" {getattr(said, field.name)!r}"
      for field in dataclasses.fields(config)
      if field.name not in ("layer_pattern", *_TRAINING_ONLY)
      and getattr(config, field.name) != getattr(said, field.name)
    ]
    if config.layer_kinds != said.layer_kinds:
      wrong.append(f"model.layer_pattern={config.layer_pattern!r} is not its")
    if wrong:
      raise ValueError(
        f"family {self.model_type!r} cannot express this model:"
        f" {'; '.join(wrong)}"
      )
    return values


# They do not change what a finished model computes.
_TRAINING_ONLY = ("embed_dropout", "residual_dropout")


def _finished(config: ModelConfig) -> ModelConfig:
  """The model without what only training reads of its router."""
  if config.moe is None:
    return config
  moe = dataclasses.replace(config.moe, balance_loss=0.0, z_loss=0.0)
  return dataclasses.replace(config, moe=moe)
