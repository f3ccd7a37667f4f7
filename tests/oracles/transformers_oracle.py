"""Transformers' own models on named weights. Needs torch."""

import numpy as np
import torch
import transformers

from tests.oracles import family_cases, named_weights

# Their grouped matmul wants sizes that are multiples of 4.
PLAIN = dict(attn_implementation="eager", experts_implementation="eager")


def build(name: str) -> transformers.PreTrainedModel:
  """The model of a case, in float32 with plain attention."""
  values = dict(family_cases.CONFIGS[name])
  config = transformers.AutoConfig.for_model(
    values.pop("model_type"),
    **values,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
  )
  model = transformers.AutoModelForCausalLM.from_config(
    config, **PLAIN, dtype=torch.float32
  )
  centre = family_cases.norm_centre(name)
  with torch.no_grad():
    for key, parameter in model.named_parameters():
      if ".mlp.experts." in key:
        value = _experts(config.model_type, key, tuple(parameter.shape))
      else:
        key = key.replace(
          "mlp.gate.", f"{_experts_of(config.model_type)}.gate."
        )
        value = named_weights.make(key, tuple(parameter.shape), centre=centre)
      parameter.copy_(torch.from_numpy(value))
  return model.eval()


def _experts_of(model_type: str) -> str:
  """What checkpoints call the layer of experts, "mlp" in transformers."""
  return "block_sparse_moe" if model_type == "mixtral" else "mlp"


def _experts(model_type: str, key: str, shape: tuple[int, ...]) -> np.ndarray:
  """A stack of matrices that a checkpoint holds one by one.

  Transformers 5 keeps gate and up of all experts as one array; it says so
  nowhere but in its own loading of checkpoints, which a live test runs.
  """
  prefix, role = key.rsplit(".", 1)
  prefix = prefix.replace(".mlp.", f".{_experts_of(model_type)}.")
  names = ("gate_proj", "up_proj") if role == "gate_up_proj" else ("down_proj",)
  if model_type == "mixtral":
    names = ("w1", "w3") if role == "gate_up_proj" else ("w2",)
  one = (shape[1] // len(names), shape[2])
  make = lambda e, name: named_weights.make(
    f"{prefix}.{e}.{name}.weight", one, centre=0.0
  )
  stack = lambda e: np.concatenate([make(e, name) for name in names])
  return np.stack([stack(e) for e in range(shape[0])])


def logits(
  model: transformers.PreTrainedModel, batch: dict[str, np.ndarray]
) -> np.ndarray:
  """Logits of real tokens, row by row, float32 [real tokens, V]."""
  with torch.no_grad():
    result = model(
      input_ids=torch.from_numpy(batch["tokens"]).long(),
      attention_mask=torch.from_numpy(batch["mask"]).long(),
      position_ids=torch.from_numpy(batch["positions"]).long(),
      use_cache=False,
    )
  return result.logits.numpy()[batch["mask"] == 1]
