"""The table of loops: their own programs, from files as a user has them."""

import json

import jax
import pytest

from configs import cli
from plan import held
from plan.loops import LOOPS
from sharding.mesh import make_mesh
from tests.plan import dry_runs
from train.initial import load_config


@pytest.mark.parametrize("loop", [n for n in LOOPS if LOOPS[n].trains])
def test_the_settings_of_a_loop_are_those_of_its_program(loop, tmp_path):
  """Rows and state, of which the figures that are not compiled are made."""
  entry = LOOPS[loop]
  config = cli.load(f"{dry_runs.write(tmp_path)}:{loop}")
  assert isinstance(config, entry.config_class)
  model = entry.model(config)
  program = entry.program(config, model, make_mesh(config.mesh))
  run = entry.as_pretraining(config, model)
  assert run.data.global_batch_size == program.num_rows
  assert run.data.seq_len == 256 and run.model == program.model == model
  state = held.hold(run, jax.device_count()).state
  of = lambda tree: [
    (leaf.shape, leaf.dtype, leaf.sharding.spec)
    for leaf in jax.tree.leaves(tree)
  ]
  assert of(state) == of(program.abstract)


def test_a_folder_tells_its_model_without_weights(tmp_path):
  dry_runs.write(tmp_path)
  found = load_config(str(tmp_path))
  assert found.embed_dim == dry_runs.MODEL["hidden_size"]
  (tmp_path / "config.json").unlink()
  with pytest.raises(ValueError, match="config.json; it has neither"):
    load_config(str(tmp_path))
  with pytest.raises(ValueError, match="does not exist"):
    load_config(str(tmp_path / "none"))


def test_rows_longer_than_the_model_are_refused(tmp_path):
  config = cli.load(f"{dry_runs.write(tmp_path)}:sft")
  short = dry_runs.MODEL | {"max_position_embeddings": 128}
  (tmp_path / "config.json").write_text(json.dumps(short))
  with pytest.raises(ValueError, match="seq_len=256 is longer"):
    LOOPS["sft"].model(config)
