"""Every file of configs/ gives a valid config, for each of its variants."""

import inspect
import pathlib
import subprocess
import sys
import typing

import pytest

from configs import cli
from configs.typed import leaves
from data.config import PrepareConfig
from sharding.axes import MESH_AXES
from train.run_config import PretrainConfig, SFTConfig

_FOLDER = pathlib.Path(__file__).parents[2] / "configs"
_FILES = sorted(
  path for path in _FOLDER.glob("*.py") if "def get_config" in path.read_text()
)


def _variants(path: pathlib.Path) -> list[str]:
  """FILE.py, and FILE.py:variant for each."""
  cli.load(str(path))
  module = sys.modules[f"config_file_{path.stem}"]
  parameters = inspect.signature(module.get_config).parameters
  hints = typing.get_type_hints(module.get_config)
  names = [typing.get_args(hints[name]) for name in parameters]
  return [str(path)] + [f"{path}:{variant}" for row in names for variant in row]


_ALL = [path for file in _FILES for path in _variants(file)]


def test_there_are_some():
  assert len(_FILES) >= 4
  assert len(_ALL) >= 10


@pytest.mark.parametrize("path", _ALL, ids=[p.split("/")[-1] for p in _ALL])
def test_is_valid(path):
  config = cli.load(path)
  cli.check(config)
  assert cli.from_dict(type(config), cli.to_dict(config)) == config


@pytest.mark.parametrize(
  ("variant", "devices"), [("v5e-8", 8), ("v5e-256", 256), ("v6e-64", 64)]
)
def test_tpu_meshes_divide_what_they_split(variant, devices):
  config = cli.load(f"{_FOLDER}/smollm2_135m.py:{variant}")
  size = 1
  for axis in MESH_AXES:
    size *= getattr(config.mesh, axis)
  assert size == devices
  rows = config.data.global_batch_size
  shards = config.mesh.data * config.mesh.fsdp
  assert rows % (shards * config.step.accumulation) == 0
  assert config.model.embed_dim % config.mesh.fsdp == 0
  assert rows * config.data.seq_len == 2**20


def test_defaults_are_those_of_the_articles():
  """Learning rates, decay and clipping, as the fields' own defaults."""
  for cls, rate in ((PretrainConfig, 2e-4), (SFTConfig, 2e-5)):
    fields = {field: value for field, _, value in leaves(cls)}
    assert fields["schedule.peak"] == rate
    assert fields["optimizer.weight_decay"] == 0.1
    assert fields["optimizer.clip_norm"] == 1.0
    assert fields["schedule.kind"] == "cosine"
    assert fields["schedule.warmup_fraction"] > 0
  sft = cli.load(f"{_FOLDER}/sft.py")
  assert sft.schedule.peak == 2e-5
  assert 1 <= sft.num_epochs <= 3
  assert 128 <= sft.data.global_batch_size <= 512
  assert 2048 <= sft.data.seq_len <= 4096
  assert isinstance(cli.load(f"{_FOLDER}/sft.py:data"), PrepareConfig)


def test_configs_import_no_jax():
  code = "import sys\nfrom configs import cli\n"
  code += "".join(f"cli.load({path!r})\n" for path in _ALL)
  code += "assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], cwd=_FOLDER.parent, check=True)
