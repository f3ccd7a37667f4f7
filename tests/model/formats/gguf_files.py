"""GGUF files as llama.cpp's converter would write them, for tests.

Names come from the gguf package's own map, permutation and offsets from
convert_hf_to_gguf.py.
"""

import gguf
import numpy as np

from tests.model.families.test_parity import config_of
from tests.oracles import family_cases
from tests.oracles.named_checkpoint import NamedCheckpoint

_ARCHITECTURES = {
  "llama": gguf.MODEL_ARCH.LLAMA,
  "mistral": gguf.MODEL_ARCH.LLAMA,
  "qwen2": gguf.MODEL_ARCH.QWEN2,
  "qwen3": gguf.MODEL_ARCH.QWEN3,
  "gemma2": gguf.MODEL_ARCH.GEMMA2,
  "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
  """LlamaModel.permute of the converter."""
  halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
  return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write(path, case: str, *, extra_tensors=(), **fields) -> None:
  """Writes the model of a case, unquantised.

  Args:
    path: of the file.
    case: a key of `family_cases.CONFIGS`.
    extra_tensors: names and arrays to add.
    **fields: integer or float metadata to add; "__" stands for ".".
  """
  values = family_cases.CONFIGS[case]
  arch = _ARCHITECTURES[values["model_type"]]
  prefix = gguf.MODEL_ARCH_NAMES[arch]
  writer = gguf.GGUFWriter(path, prefix)
  writer.add_block_count(values["num_hidden_layers"])
  writer.add_context_length(values["max_position_embeddings"])
  writer.add_embedding_length(values["hidden_size"])
  writer.add_feed_forward_length(values["intermediate_size"])
  writer.add_head_count(values["num_attention_heads"])
  writer.add_head_count_kv(values["num_key_value_heads"])
  writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
  writer.add_key_length(values["head_dim"])
  writer.add_value_length(values["head_dim"])
  writer.add_vocab_size(values["vocab_size"])
  writer.add_file_type(0)
  config = config_of(case)
  writer.add_rope_freq_base(config.rope.theta)
  if config.rope.scaling == "linear":
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config.rope.factor)
  if config.rope.scaling == "yarn":
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope.factor)
    writer.add_rope_scaling_orig_ctx_len(config.rope.original_max_positions)
  if prefix.startswith("gemma"):
    writer.add_sliding_window(values["sliding_window"])
  if prefix == "gemma2":
    writer.add_attn_logit_softcapping(values["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(values["final_logit_softcapping"])
  for name, value in fields.items():
    add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
    add(f"{prefix}.{name.replace('__', '.')}", value)

  names = gguf.get_tensor_name_map(arch, values["num_hidden_layers"])
  source = NamedCheckpoint(case)
  for name in source.names():
    value = source.read(name)
    if prefix == "llama" and "q_proj" in name:
      value = _permute(value, values["num_attention_heads"])
    if prefix == "llama" and "k_proj" in name:
      value = _permute(value, values["num_key_value_heads"])
    if prefix.startswith("gemma") and name.endswith("norm.weight"):
      value = value + np.float32(1)
    writer.add_tensor(names.get_name(name, (".weight", ".bias")), value)
  for name, value in extra_tensors:
    writer.add_tensor(name, value)
  finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
  """Writes what a writer has gathered."""
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
