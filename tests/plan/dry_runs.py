"""Small runs of each loop, in files as a user has them."""

import json
import pathlib

MODEL = {
  "model_type": "llama",
  "vocab_size": 256,
  "hidden_size": 128,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 2,
  "head_dim": 64,
  "intermediate_size": 256,
  "max_position_embeddings": 256,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1e4,
  "hidden_act": "silu",
  "tie_word_embeddings": False,
}

_FILE = """
from align.config import DPOConfig, PairsConfig
from data.config import DataConfig
from sharding.axes import MeshConfig
from train.config import StepConfig
from train.run_config import PretrainConfig, SFTConfig
from train.initial import load_config

_RUN = dict(
  mesh=MeshConfig(fsdp=-1, tensor=2),
  step=StepConfig(precision="bf16", remat="block"),
)
_ROWS = dict(tokenizer="", seq_len=256, global_batch_size=8)


def get_config(loop="pretrain"):
  if loop == "dpo":
    data = PairsConfig(path="none", **_ROWS)
    return DPOConfig(init_from="{folder}", data=data, **_RUN)
  data = DataConfig(sources=(), **_ROWS)
  if loop == "sft":
    return SFTConfig(init_from="{folder}", data=data, **_RUN)
  model = load_config("{folder}")
  return PretrainConfig(model=model, data=data, num_steps=10, **_RUN)
"""


def write(folder: pathlib.Path) -> str:
  """Writes a config file and the model that its runs start from.

  Args:
    folder: where.

  Returns:
    Path of the file, whose variants are the loops.
  """
  (folder / "config.json").write_text(json.dumps(MODEL))
  path = folder / "runs.py"
  path.write_text(_FILE.replace("{folder}", str(folder)))
  return str(path)
