"""Import and export of Hugging Face folders.

A folder holds config.json, safetensors and the files of a tokenizer.
"""

import json
import pathlib
import shutil
from collections.abc import Mapping

import numpy as np
from jax.sharding import Mesh

from model.config import ModelConfig
from model.families import registry
from model.families.family import Family
from model.formats import safetensors, weights_map
from model.transformer import Transformer
from sharding.axes import Rules

TOKENIZER_FILES = (
  "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
  "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt",
  "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_config(folder) -> tuple[Family, ModelConfig]:
  """What model a folder holds.

  Raises:
    FileNotFoundError: there is no config.json.
    ValueError: the family is unknown, or the model is one that the decoder
      cannot compute exactly.
  """
  path = pathlib.Path(folder) / "config.json"
  if not path.exists():
    raise FileNotFoundError(
      f"{path} is not there: name a folder in Hugging Face's format"
    )
  values = json.loads(path.read_text())
  family = registry.find(values.get("model_type", ""))
  return family, family.config(values)


def load(
  folder, *, mesh: Mesh | None = None, rules: Rules = Rules()
) -> Transformer:
  """The model of a folder, in float32.

  Args:
    folder: config.json and safetensors.
    mesh: where to place the weights, shard by shard; None: one device.
    rules: how logical dims map to the axes of `mesh`.

  Raises:
    ValueError: see `load_config` and `weights_map.load`.
  """
  family, config = load_config(folder)
  checkpoint = safetensors.Checkpoint(folder)
  # Old Llama files carry the frequencies that config.json gives anyway.
  ignored = {n for n in checkpoint.names() if n.endswith("rotary_emb.inv_freq")}
  if config.tied and _HEAD in checkpoint.names():
    if not np.array_equal(checkpoint.read(_HEAD), checkpoint.read(_EMBED)):
      raise ValueError(
        f"{folder}: tie_word_embeddings is true but {_HEAD} and {_EMBED}"
        " differ; set it to false in config.json to use both"
      )
    ignored.add(_HEAD)
  return weights_map.load(
    config, family.names, checkpoint, ignored=ignored, mesh=mesh, rules=rules
  )


def export(
  model: Transformer,
  folder,
  *,
  family: str,
  dtype: str = "float32",
  tokenizer=None,
  token_ids: Mapping[str, int] | None = None,
  max_shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes a folder that `transformers.AutoModelForCausalLM` loads.

  The folder appears whole or not at all.

  Args:
    model: all of its weights must be addressable by this process.
    folder: to create.
    family: its `model_type`, such as "llama".
    dtype: of the stored weights: "float32", "bfloat16" or "float16".
    tokenizer: a folder whose tokenizer files are copied.
    token_ids: "bos_token_id", "eos_token_id", "pad_token_id" where there are
      such; transformers would guess those that are absent, so null is written.
    max_shard_bytes: size above which weights are split into several files.

  Raises:
    FileExistsError: the folder is there already.
    ValueError: the family cannot express the model.
  """
  folder = pathlib.Path(folder)
  if folder.exists():
    raise FileExistsError(f"{folder} exists; choose another or remove it")
  found = registry.find(family)
  no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
  values = (
    found.config_json(model.config)
    | {"torch_dtype": dtype}
    | no_ids
    | dict(token_ids or {})
  )
  partial = folder.with_name(folder.name + ".partial")
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  safetensors.write(
    partial,
    weights_map.tensors(model, found.names, dtype),
    max_shard_bytes=max_shard_bytes,
  )
  (partial / "config.json").write_text(json.dumps(values, indent=2) + "\n")
  if tokenizer is not None:
    for name in TOKENIZER_FILES:
      if (pathlib.Path(tokenizer) / name).exists():
        shutil.copy(pathlib.Path(tokenizer) / name, partial / name)
  partial.rename(folder)
