"""The command line of a main, as a newcomer meets it: in a subprocess."""

import os
import pathlib
import subprocess
import sys

import pytest

from configs import cli
from model.config import ModelConfig, Rope

_ROOT = pathlib.Path(__file__).parents[2]
_MAIN = '''"""Trains nothing.

A second line.
"""
import sys
from configs import cli
from model.config import ModelConfig

def run(config, workdir):
  print("ran", config.num_heads, config.rope, workdir, "jax" in sys.modules)

if __name__ == "__main__":
  cli.launch(run, ModelConfig)
'''
_CONFIG = """
import typing
from model.config import ModelConfig, Rope

def get_config(variant: typing.Literal["base", "large"] = "base"):
  return ModelConfig(
    vocab_size=7, num_layers={"base": 1, "large": 3}[variant], embed_dim=8,
    num_heads=4, num_kv_heads=2, head_dim=2, mlp_dim=8, max_positions=5,
    rope=Rope(theta=1e4),
  )
"""


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "main.py").write_text(_MAIN)
  (tmp_path / "run.py").write_text(_CONFIG)
  return tmp_path


def _call(folder, *arguments):
  return subprocess.run(
    [sys.executable, "main.py", *arguments],
    cwd=folder,
    env=os.environ | {"PYTHONPATH": str(_ROOT)},
    capture_output=True,
    text=True,
  )


def test_runs_with_overrides(folder):
  got = _call(
    folder, "--config=run.py:large", "--workdir", "out",
    "--config.num_heads=6", "--config.rope=none", "--config.num_kv_heads=3",
  )  # fmt: skip
  assert (got.returncode, got.stdout) == (0, "ran 6 None out False\n"), got


def test_help_lists_the_settings_and_imports_no_jax(folder):
  main = folder / "main.py"
  main.write_text(
    "import atexit, sys\n"
    "atexit.register(lambda: print('jax' in sys.modules))\n"
    + _MAIN.replace('"""Trains nothing.', '__doc__ = """Trains nothing.')
  )
  got = _call(folder, "--help")
  lines = got.stdout.splitlines()
  assert got.returncode == 0 and lines[0] == "Trains nothing."
  assert lines[-1] == "False", "--help imports jax"
  assert "  --config.num_layers=(required)  int" in lines
  assert "  --config.rope.scaling='none'  none, linear, llama3 or yarn" in lines
  assert "  --config.norm='rms'  rms or layer" in lines


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([], "--config is missing: FILE.py or FILE.py:variant, the run"),
    (["--config=run.py"], "--workdir is missing: folder for all that the run"),
    (["run.py"], "wanted --config.KEY=VALUE, got 'run.py'"),
    (["--confg=run.py"], "flag 'confg'. Did you mean: config ?"),
    (["--config=run.py", "--config.norm"], "wanted --config.KEY=VALUE, got"),
    (["--config=run.py", "--config.norms=x"], "did you mean norm or norm_eps"),
    (["--config=run.py", "--config.norm=x"], "wanted rms or layer, got 'x'"),
    (["--config=run.py", "--config.num_heads=3"], "num_heads=3 must be a"),
  ],
)
def test_mistakes_are_one_line_without_a_traceback(folder, arguments, message):
  if "workdir" not in message and len(arguments) > 1:
    arguments = [*arguments, "--workdir=out"]
  got = _call(folder, *arguments)
  assert got.returncode == 1 and message in got.stderr, got
  assert got.stderr.count("\n") == 1 and got.stderr.startswith("error: "), got


def test_load_gives_the_variant(folder):
  assert cli.load(f"{folder}/run.py").num_layers == 1
  assert cli.load(f"{folder}/run.py:large").num_layers == 3


@pytest.mark.parametrize(
  ("content", "suffix", "message"),
  [
    (None, "", "there is no file '.*rn.py'; did you mean .*run.py"),
    ("", "", r"get_config\(\) that returns the config; '.*rn.py' is empty"),
    ("\n \n", "", "rn.py' is empty"),
    ("x = 1", "", "rn.py' does not have it"),
    (_CONFIG, ":lrge", "has no variant 'lrge'; did you mean large?"),
    (_CONFIG, ":x", "has no variant 'x'; known are: base, large"),
    ("def get_config(): pass", ":x", "has no variants, got :x"),
    ("def get_config(): return 3", "", "wants a ModelConfig, .* returned int"),
    (_CONFIG.replace("1e4", "'a'"), "", "config.rope.theta: wanted float, got"),
  ],
)
def test_mistakes_in_the_file(folder, content, suffix, message):
  path = folder / "rn.py"
  if content is not None:
    path.write_text(content)
  with pytest.raises(ValueError, match=message):
    cli.configure(f"{path}{suffix}", ModelConfig, {})


@pytest.mark.parametrize("path", ["run", "run.yaml", ".py", "run.py:"])
def test_what_is_not_a_python_file_is_refused(path):
  with pytest.raises(
    ValueError, match="wanted FILE.py or FILE.py:variant, got"
  ):
    cli.load(path)


def test_a_value_may_be_any_text(folder):
  path = folder / "text.py"
  path.write_text(
    "import dataclasses\n"
    "@dataclasses.dataclass(frozen=True)\n"
    "class Config:\n"
    "  template: str = ''\n"
    "get_config = Config\n"
  )
  config = cli.load(str(path))
  got = cli.configure(str(path), object, {"template": "{{ a }}\n=b"})
  assert config.template == "" and got.template == "{{ a }}\n=b"


def test_the_package_offers_both_ways_of_json():
  rope = Rope(theta=1e4, scaling="linear")
  assert cli.from_dict(Rope, cli.to_dict(rope)) == rope
