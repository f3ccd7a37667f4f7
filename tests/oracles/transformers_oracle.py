"""Transformers' own models on named weights. Needs torch."""

import numpy as np
import torch
import transformers

from tests.oracles import family_cases, named_weights


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
    config, attn_implementation="eager", dtype=torch.float32
  )
  centre = family_cases.norm_centre(name)
  with torch.no_grad():
    for key, parameter in model.named_parameters():
      value = named_weights.make(key, tuple(parameter.shape), centre=centre)
      parameter.copy_(torch.from_numpy(value))
  return model.eval()


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
