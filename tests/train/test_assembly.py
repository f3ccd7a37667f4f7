"""What the mains share: the run folder, and the FLOPs of packed rows."""

import json
import pathlib

import jax
import numpy as np
import pytest

from data.loader import Loader
from data.tokenized import Example, InMemory
from model import accounting
from model.execution import Execution
from model.precision import POLICIES
from sharding.axes import MeshConfig, Rules
from sharding.distributed import DistributedConfig
from sharding.mesh import make_mesh
from tests.train import tiny_run
from train import assembly, peak
from train.config import StepConfig


@pytest.fixture
def mesh():
  return make_mesh(MeshConfig(data=2, fsdp=1))


def test_the_folder_is_made_and_its_config_replaced(tmp_path):
  for content in ('{"a": 1}', '{"a": 2}'):
    folder = assembly.open_run(
      str(tmp_path / "new" / "run"),
      content,
      compilation_cache=None,
      distributed=DistributedConfig(),
    )
  assert json.loads((folder / "config.json").read_text()) == {"a": 2}
  assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_execution_takes_every_setting_of_a_step(mesh):
  config = StepConfig(
    precision="bf16", remat="block", remat_every=2, loss_chunk=96
  )
  assert assembly.make_execution(config, mesh, Rules()) == Execution(
    precision=POLICIES["bf16"],
    attention="auto",
    remat="block",
    remat_every=2,
    loss_chunk=96,
    mesh=mesh,
    rules=Rules(),
  )


def test_flops_of_packed_rows_count_what_the_mask_allows(mesh, monkeypatch):
  monkeypatch.setattr(peak, "measured_rate", lambda *_: 1e9)
  rng = np.random.default_rng(0)
  lengths = rng.integers(20, 90, 60)
  store = InMemory(Example(f"{i}", [1] * n) for i, n in enumerate(lengths))
  loader = Loader(store, seq_len=128, global_batch_size=4, num_epochs=1)
  config = tiny_run.config(pathlib.Path()).model
  execution = Execution(mesh=mesh, remat="block")
  found = assembly.utilisation(config, loader, execution)["flops"]

  allowed, queries = 0, 0
  causal = np.tril(np.ones((128, 128), bool))
  for step in range(loader.num_batches):
    segments = loader.batch(step)[0]["segment_ids"]
    same = segments[:, :, None] == segments[:, None, :]
    real = segments[:, :, None] > 0
    allowed += np.count_nonzero(same & causal & real)
    queries += np.count_nonzero(segments)
  keys = allowed / queries
  full = accounting.flops_per_token(config, 128, mask="full")
  # Three passes, two matmuls of N H multiply-adds a key, in each layer.
  a_key = 3 * 4 * config.num_heads * config.head_dim * config.num_layers
  assert found.full == full
  assert found.exact == pytest.approx(full - a_key * (128 - keys), rel=1e-3)
  assert found.hardware == accounting.hardware_flops_per_token(
    config, round(2 * keys - 1), "block"
  )


def test_the_compilation_cache_is_kept_where_it_is_asked_for(tmp_path):
  before = jax.config.jax_compilation_cache_dir
  try:
    assembly.open_run(
      str(tmp_path),
      "{}",
      compilation_cache=str(tmp_path / "compiled"),
      distributed=DistributedConfig(),
    )
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
