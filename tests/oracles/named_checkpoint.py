"""The checkpoint of a tiny model without torch: shapes by hand."""

from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from tests.oracles import family_cases, named_weights


class NamedCheckpoint:
  """What transformers would save for a case, made again from names."""

  def __init__(self, case: str):
    """case: a key of `family_cases.CONFIGS`."""
    self._shapes = _shapes(family_cases.CONFIGS[case])
    self._centre = family_cases.norm_centre(case)

  def names(self) -> Set[str]:
    """Of all tensors."""
    return self._shapes.keys()

  def shape(self, name: str) -> tuple[int, ...]:
    """As transformers stores it."""
    return self._shapes[name]

  def read(self, name: str) -> np.ndarray:
    """A tensor, float32."""
    return named_weights.make(name, self._shapes[name], centre=self._centre)


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  family = config["model_type"]
  D, F = config["hidden_size"], config["intermediate_size"]
  H, V = config["head_dim"], config["vocab_size"]
  queries = config["num_attention_heads"] * H
  keys = config["num_key_value_heads"] * H
  attention_bias = config.get("attention_bias", False)
  layer = {
    "self_attn.q_proj.weight": (queries, D),
    "self_attn.k_proj.weight": (keys, D),
    "self_attn.v_proj.weight": (keys, D),
    "self_attn.o_proj.weight": (D, queries),
    "input_layernorm.weight": (D,),
    "post_attention_layernorm.weight": (D,),
  }
  if family == "mixtral":
    E, experts = config["num_local_experts"], "block_sparse_moe"
    projections = {"w1": (F, D), "w3": (F, D), "w2": (D, F)}
  else:
    E, experts = config.get("num_experts"), "mlp"
    F = config.get("moe_intermediate_size", F)
    names = ("gate_proj", "up_proj", "down_proj")
    projections = dict(zip(names, ((F, D), (F, D), (D, F))))
  if E is None:
    layer |= {f"mlp.{k}.weight": shape for k, shape in projections.items()}
  else:
    layer[f"{experts}.gate.weight"] = (E, D)
    layer |= {
      f"{experts}.experts.{e}.{k}.weight": shape
      for e in range(E)
      for k, shape in projections.items()
    }
  if attention_bias or family == "qwen2":
    layer |= {
      "self_attn.q_proj.bias": (queries,),
      "self_attn.k_proj.bias": (keys,),
      "self_attn.v_proj.bias": (keys,),
    }
  if attention_bias:
    layer["self_attn.o_proj.bias"] = (D,)
  if config.get("mlp_bias"):
    layer |= {
      "mlp.gate_proj.bias": (F,),
      "mlp.up_proj.bias": (F,),
      "mlp.down_proj.bias": (D,),
    }
  if family in ("qwen3", "qwen3_moe", "gemma3_text"):
    layer |= {
      "self_attn.q_norm.weight": (H,),
      "self_attn.k_norm.weight": (H,),
    }
  if family.startswith("gemma"):
    layer |= {
      "pre_feedforward_layernorm.weight": (D,),
      "post_feedforward_layernorm.weight": (D,),
    }
  shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
  if not config.get("tie_word_embeddings"):
    shapes["lm_head.weight"] = (V, D)
  for i in range(config["num_hidden_layers"]):
    shapes |= {f"model.layers.{i}.{k}": v for k, v in layer.items()}
  return shapes
