"""Strict reading of a checkpoint's metadata.

Every field must be understood: one that nobody reads may change what the
model computes, so it is an error and never ignored.
"""

from collections.abc import Mapping
from typing import Any

from model.config import ModelConfig, Rope

# The default of what has none.
REQUIRED: Any = object()

# Say nothing about the forward pass of a decoder: tokens, dtypes, caches,
# parallelism, provenance, defaults of generation.
_HARMLESS = frozenset({
  "_attn_implementation_autoset", "_commit_hash", "_name_or_path",
  "architectures", "bos_token_id", "cache_implementation", "dtype",
  "eos_token_id", "id2label", "label2id", "pad_token_id", "pretraining_tp",
  "torch_dtype", "transformers.js_config", "transformers_version",
  "chunk_size_feed_forward", "is_encoder_decoder", "output_attentions",
  "output_hidden_states", "problem_type", "return_dict", "unk_token_id",
  "unsloth_fixed", "unsloth_version", "use_cache",
})  # fmt: skip


class Fields:
  """Metadata whose every field must be read, then `finish()` called.

  Attributes:
    source: what the fields were read from, for messages.
  """

  def __init__(self, values: Mapping[str, Any], *, source: str):
    self.source = source
    self._left = {k: v for k, v in values.items() if k not in _HARMLESS}

  def __contains__(self, name: str) -> bool:
    return name in self._left

  def take(self, name: str, default: Any = REQUIRED) -> Any:
    """Reads a field; absent and null mean `default`.

    Raises:
      ValueError: it has no default and is missing.
    """
    value = self._left.pop(name, None)
    if value is not None:
      return value
    if default is REQUIRED:
      raise ValueError(
        f"{self.source}: field {name!r} is missing or null; it decides what"
        " the model computes and has no default"
      )
    return default

  def take_nullable(self, name: str) -> Any:
    """Reads a field that must be there; null means None.

    For fields whose absence means something else than null.
    """
    if name not in self._left:
      raise ValueError(
        f"{self.source}: field {name!r} is missing; write null to say none"
      )
    return self._left.pop(name)

  def expect(self, name: str, *allowed: Any) -> None:
    """Reads a field that may be absent, null, or one of `allowed`.

    Raises:
      ValueError: it asks for something that the model cannot do.
    """
    value = self._left.pop(name, None)
    if value is not None and value not in allowed:
      raise ValueError(
        f"{self.source}: {name}={value!r} is not supported; supported:"
        f" {', '.join(map(repr, allowed))}"
      )

  def finish(self) -> None:
    """Raises ValueError if a field was not read."""
    if self._left:
      listed = ", ".join(f"{k}={v!r:.60}" for k, v in self._left.items())
      raise ValueError(
        f"{self.source}: fields that this family does not know: {listed}. They"
        " may change what the model computes; delete those that do not"
      )


def read_decoder(fields: Fields, *, derive_head_dim: bool = True) -> dict:
  """ModelConfig arguments that every family spells alike in config.json.

  Args:
    fields: of config.json.
    derive_head_dim: where `head_dim` is absent it is D / N, not an error.
  """
  embed_dim = fields.take("hidden_size")
  num_heads = fields.take("num_attention_heads")
  head_dim = embed_dim // num_heads if derive_head_dim else REQUIRED
  return {
    "vocab_size": fields.take("vocab_size"),
    "num_layers": fields.take("num_hidden_layers"),
    "embed_dim": embed_dim,
    "num_heads": num_heads,
    "num_kv_heads": fields.take("num_key_value_heads", num_heads),
    "head_dim": fields.take("head_dim", head_dim),
    "mlp_dim": fields.take("intermediate_size"),
    "max_positions": fields.take("max_position_embeddings"),
    "norm_eps": fields.take("rms_norm_eps"),
    "attention_dropout": float(fields.take("attention_dropout", 0.0)),
    "init_std": fields.take("initializer_range", 0.02),
  }


def write_decoder(config: ModelConfig) -> dict:
  """The inverse of `read_decoder`."""
  return {
    "vocab_size": config.vocab_size,
    "num_hidden_layers": config.num_layers,
    "hidden_size": config.embed_dim,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "intermediate_size": config.mlp_dim,
    "max_position_embeddings": config.max_positions,
    "rms_norm_eps": config.norm_eps,
    "attention_dropout": config.attention_dropout,
    "initializer_range": config.init_std,
    "tie_word_embeddings": config.tied,
  }


def read_rope(
  fields: Fields, max_positions: int, *, theta: float = REQUIRED
) -> Rope:
  """The rotary embedding that all layers share.

  Transformers 5 writes `rope_parameters`; older versions and most published
  files have `rope_theta` and `rope_scaling`.

  Args:
    fields: of config.json.
    max_positions: "llama3" and "yarn" start from it where they do not say.
    theta: the value where the field is absent, in families whose files
      predate it.
  """
  if "rope_parameters" in fields:
    return parse_rope(fields.take("rope_parameters"), max_positions, fields)
  parameters = {
    "rope_theta": fields.take("rope_theta", theta),
    **fields.take("rope_scaling", {}),
  }
  return parse_rope(parameters, max_positions, fields)


def parse_rope(
  parameters: Mapping[str, Any], max_positions: int, fields: Fields
) -> Rope:
  """One rotary embedding from the `rope_parameters` of transformers 5."""
  inner = Fields(parameters, source=f"{fields.source}: rotary embedding")
  kind = inner.take("rope_type", inner.take("type", "default"))
  arguments = {"theta": float(inner.take("rope_theta"))}
  inner.expect("partial_rotary_factor", 1.0)
  if kind in ("linear", "llama3", "yarn"):
    arguments["scaling"] = kind
    arguments["factor"] = float(inner.take("factor"))
  elif kind != "default":
    raise ValueError(
      f"{inner.source}: rope_type={kind!r} is not supported; supported:"
      " 'default', 'linear', 'llama3', 'yarn'"
    )
  if kind in ("llama3", "yarn"):
    arguments["original_max_positions"] = inner.take(
      "original_max_position_embeddings", max_positions
    )
  if kind == "llama3":
    arguments["low_freq_factor"] = float(inner.take("low_freq_factor"))
    arguments["high_freq_factor"] = float(inner.take("high_freq_factor"))
  if kind == "yarn":
    arguments["beta_fast"] = float(inner.take("beta_fast", 32.0))
    arguments["beta_slow"] = float(inner.take("beta_slow", 1.0))
    arguments["attention_factor"] = inner.take("attention_factor", None)
    arguments["truncate"] = inner.take("truncate", True)
  inner.finish()
  return Rope(**arguments)


def write_rope(rope: Rope | None) -> dict:
  """`rope_theta` and `rope_scaling`, which every transformers reads."""
  if rope is None:
    raise ValueError("model.rope=None: no family is without positions")
  scaling = {"rope_type": rope.scaling, "factor": rope.factor}
  if rope.scaling in ("llama3", "yarn"):
    scaling["original_max_position_embeddings"] = rope.original_max_positions
  if rope.scaling == "llama3":
    scaling["low_freq_factor"] = rope.low_freq_factor
    scaling["high_freq_factor"] = rope.high_freq_factor
  if rope.scaling == "yarn":
    scaling["beta_fast"] = rope.beta_fast
    scaling["beta_slow"] = rope.beta_slow
    scaling["truncate"] = rope.truncate
    if rope.attention_factor is not None:
      scaling["attention_factor"] = rope.attention_factor
  return {
    "rope_theta": rope.theta,
    "rope_scaling": None if rope.scaling == "none" else scaling,
  }


def read_layer_pattern(
  fields: Fields, num_layers: int, default: tuple[str, ...]
) -> tuple[str, ...]:
  """Kinds of layers; `layer_types` lists all L of them.

  Returns:
    The shortest pattern that gives these kinds when repeated.
  """
  types = fields.take("layer_types", None)
  if types is None:
    return default
  kinds = {"full_attention": "global", "sliding_attention": "local"}
  unknown = sorted(set(types) - set(kinds))
  if unknown or len(types) != num_layers:
    raise ValueError(
      f"{fields.source}: layer_types must name {num_layers} layers, each one of"
      f" {sorted(kinds)}; got {len(types)}, unknown: {unknown}"
    )
  for length in range(1, num_layers + 1):
    if all(types[i] == types[i % length] for i in range(num_layers)):
      break
  return tuple(kinds[t] for t in types[:length])


def write_layer_types(config: ModelConfig) -> list[str]:
  """The inverse of `read_layer_pattern`."""
  types = {"global": "full_attention", "local": "sliding_attention"}
  return [types[kind] for kind in config.layer_kinds]
