"""Tiny models of every family, as the config.json that transformers reads.

Each is smaller than what it sees: sequences are longer than windows and than
the positions before scaling; vocabularies are odd, heads are not D / N wide
and share keys.
"""

from typing import Any

import numpy as np

BATCH, LENGTH = 3, 23
_PADDING = 5

_SIZES = {
  "vocab_size": 61,
  "hidden_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 10,
  "intermediate_size": 37,
  "max_position_embeddings": 64,
}
_SILU = {"hidden_act": "silu", "rms_norm_eps": 1e-5}
_GEMMA = {
  "hidden_activation": "gelu_pytorch_tanh",
  "rms_norm_eps": 1e-6,
  "query_pre_attn_scalar": 5,
  "sliding_window": 7,
  "tie_word_embeddings": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
  "llama2": _SIZES | _SILU | {
    "model_type": "llama",
    "rope_theta": 10_000.0,
  },
  "llama_bias": _SIZES | _SILU | {
    "model_type": "llama",
    "rope_theta": 10_000.0,
    "attention_bias": True,
    "mlp_bias": True,
  },
  "llama3": _SIZES | _SILU | {
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rope_theta": 500.0,
    "rope_scaling": {
      "rope_type": "llama3",
      "factor": 8.0,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 16,
    },
    "tie_word_embeddings": True,
  },
  "smollm2": _SIZES | _SILU | {
    "model_type": "llama",
    "hidden_size": 36,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 6,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "rope_interleaved": False,
    "is_llama_config": True,
  },
  "mistral": _SIZES | _SILU | {
    "model_type": "mistral",
    "rope_theta": 10_000.0,
    "sliding_window": 7,
  },
  "qwen2": _SIZES | _SILU | {
    "model_type": "qwen2",
    "rope_theta": 1000.0,
    "rope_scaling": {
      "type": "yarn",
      "factor": 4.0,
      "original_max_position_embeddings": 16,
    },
    "use_sliding_window": False,
    "sliding_window": 7,
    "max_window_layers": 1,
  },
  "qwen3": _SIZES | _SILU | {
    "model_type": "qwen3",
    "rope_parameters": {
      "rope_type": "yarn",
      "rope_theta": 1000.0,
      "factor": 4.0,
      "original_max_position_embeddings": 16,
      "beta_fast": 1.5,
      "beta_slow": 0.2,
      "attention_factor": 1.3,
      "truncate": False,
    },
    "attention_bias": False,
    "tie_word_embeddings": True,
  },
  "mixtral": _SIZES | _SILU | {
    "model_type": "mixtral",
    "rope_theta": 10_000.0,
    "sliding_window": 7,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
  },
  "qwen3_moe": _SIZES | _SILU | {
    "model_type": "qwen3_moe",
    "rope_theta": 1000.0,
    "moe_intermediate_size": 13,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
  },
  "gemma2": _SIZES | _GEMMA | {
    "model_type": "gemma2",
    "num_hidden_layers": 3,
    "rope_theta": 10_000.0,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 4.0,
  },
  "gemma3": _SIZES | _GEMMA | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 100.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
  },
}  # fmt: skip


def inputs(name: str) -> dict[str, np.ndarray]:
  """Tokens, mask and positions, int32 [B, T], of a case.

  The first row is whole, the second padded on the left, the third on the
  right. Positions count real tokens.
  """
  rng = np.random.default_rng(len(name))
  tokens = rng.integers(0, CONFIGS[name]["vocab_size"], (BATCH, LENGTH))
  mask = np.ones((BATCH, LENGTH), np.int32)
  mask[1, :_PADDING] = 0
  mask[2, -_PADDING:] = 0
  return {
    "tokens": tokens.astype(np.int32),
    "mask": mask,
    "positions": np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int32),
  }


def norm_centre(name: str) -> float:
  """Mean of a case's norm weights: Gemma stores them minus one."""
  return 0.0 if name.startswith("gemma") else 1.0
