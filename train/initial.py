"""Weights to start from: of another run, or of a Hugging Face folder."""

import dataclasses
import pathlib

import jax
from flax import nnx
from jax.sharding import Mesh

from model.config import ModelConfig, Moe, Rope
from model.transformer import Transformer
from sharding.axes import Rules
from sharding.rules import tree_shardings
from train import checkpoint


def load_model(path: str, *, mesh: Mesh, rules: Rules) -> Transformer:
  """The weights of a folder, placed on a mesh.

  Args:
    path: a run folder (its newest whole checkpoint is taken), or a Hugging
      Face folder.
    mesh: where the weights go.
    rules: logical dim -> mesh axes.

  Raises:
    ValueError: the folder is neither, or no checkpoint of it is whole.
  """
  folder = pathlib.Path(path)
  checkpoints = folder / "checkpoints"
  found = checkpoint.steps(checkpoints)
  if found:
    run = checkpoint.run_config(checkpoints)
    abstract = _abstract_model(_model_config(run["model"]), mesh, rules)
    mastered = run.get("optimizer", {}).get("master_weights", False)
    part = "opt_state.weights" if mastered else "model"
    return checkpoint.restore_latest(checkpoints, abstract, part=part).state
  if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
    from model.formats import huggingface

    return huggingface.load(folder, mesh=mesh, rules=rules)
  raise ValueError(
    f"init_from={path!r} must be a run folder with checkpoints/STEP in it, or a"
    " Hugging Face folder with config.json and *.safetensors;"
    + (" it has neither" if folder.is_dir() else " it does not exist")
  )


def load_config(path: str) -> ModelConfig:
  """The shape of the model in a folder; no weights are read.

  Args:
    path: as for `load_model`; a Hugging Face folder may be without weights.

  Raises:
    ValueError: the folder is neither.
  """
  folder = pathlib.Path(path)
  checkpoints = folder / "checkpoints"
  if checkpoint.steps(checkpoints):
    return _model_config(checkpoint.run_config(checkpoints)["model"])
  if (folder / "config.json").is_file():
    from model.formats import huggingface

    return huggingface.load_config(folder)[1]
  raise ValueError(
    f"init_from={path!r} must be a run folder with checkpoints/STEP in it, or a"
    " Hugging Face folder with config.json;"
    + (" it has neither" if folder.is_dir() else " it does not exist")
  )


def check_same(found: ModelConfig, wanted: ModelConfig, path: str) -> None:
  """Refuses weights of another model than the config of a run describes."""
  differing = [
    f"model.{field.name}: {getattr(found, field.name)!r} in {path},"
    f" {getattr(wanted, field.name)!r} in the config"
    for field in dataclasses.fields(ModelConfig)
    if getattr(found, field.name) != getattr(wanted, field.name)
  ]
  if differing:
    raise ValueError(
      "init_from holds another model than the config asks for:"
      + "".join(f"\n  {line}" for line in differing)
    )


def _abstract_model(config: ModelConfig, mesh: Mesh, rules: Rules):
  """Shapes, dtypes and places of a model's weights."""
  abstract = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=place
    ),
    abstract,
    tree_shardings(abstract, mesh, rules),
  )


def _model_config(values: dict) -> ModelConfig:
  """The config that a manifest holds as JSON."""
  parts = {
    name: None if values.get(name) is None else part(**values[name])
    for name, part in {"rope": Rope, "rope_local": Rope, "moe": Moe}.items()
  }
  pattern = tuple(values["layer_pattern"])
  return ModelConfig(**(values | parts | {"layer_pattern": pattern}))
