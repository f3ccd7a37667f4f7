"""Families by the `model_type` of their config.json."""

import difflib
import inspect

from model.config import ModelConfig
from model.families import (
  gemma2,
  gemma3,
  llama,
  mistral,
  mixtral,
  qwen2,
  qwen3,
  qwen3_moe,
)
from model.families.family import Family

_MODULES = (
  llama,
  mistral,
  mixtral,
  qwen2,
  qwen3,
  qwen3_moe,
  gemma2,
  gemma3,
)
FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
# Name -> the function that returns its shape: "llama3_8b", ...
PRESETS = {
  name: function
  for module in _MODULES
  for name, function in inspect.getmembers(module, inspect.isfunction)
  if function.__module__ == module.__name__
  and not name.startswith("_")
  and not inspect.signature(function).parameters
}


def preset(name: str) -> ModelConfig:
  """The shape of a published model.

  Raises:
    ValueError: there is none of this name; the nearest are shown.
  """
  if name not in PRESETS:
    near = difflib.get_close_matches(name, PRESETS) or sorted(PRESETS)
    raise ValueError(f"there is no model {name!r}; did you mean one of {near}?")
  return PRESETS[name]()


def find(model_type: str) -> Family:
  """The family of a `model_type`.

  Raises:
    ValueError: there is none of this name; the nearest are shown.
  """
  if model_type not in FAMILIES:
    near = difflib.get_close_matches(model_type, FAMILIES) or sorted(FAMILIES)
    hint = ""
    if model_type == "gemma3":
      hint = "; a Gemma 3 with images must first be saved as its text model"
    raise ValueError(
      f"there is no model family {model_type!r}; did you mean one of {near}?"
      f"{hint}"
    )
  return FAMILIES[model_type]
