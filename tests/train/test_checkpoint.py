"""What was saved comes back bitwise, or not at all."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from sharding.axes import MeshConfig
from sharding.mesh import make_mesh
from train import checkpoint, manifest

ROWS = PartitionSpec("fsdp")
CONFIG = {"model": {"num_layers": 2, "rope": {"theta": 1e4}}, "seed": 3}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """Of the kinds of leaves that a training state has."""

  step: jax.Array
  model: nnx.Module
  moments: tuple


class Layer(nnx.Module):
  def __init__(self, rows: int, dtype):
    key = jax.random.key(7)
    self.w = nnx.Param(jax.random.normal(key, (rows, 8), dtype))
    self.scale = nnx.Param(jnp.ones(24, dtype))


def make(rows=16, dtype=jnp.float32) -> State:
  layer = Layer(rows, dtype)
  return State(jnp.int32(5), layer, (jax.tree.map(jnp.sin, layer), None))


def placed(mesh=None, spec=ROWS, **kwargs) -> State:
  """Shapes, dtypes and shardings; vectors are whole on every device."""
  mesh = mesh or make_mesh(MeshConfig(fsdp=8))

  def place(leaf):
    parts = spec if leaf.ndim == 2 else PartitionSpec()
    sharding = NamedSharding(mesh, parts)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree.map(place, jax.eval_shape(lambda: make(**kwargs)))


def fresh() -> State:
  shardings = jax.tree.map(lambda leaf: leaf.sharding, placed())
  return jax.jit(make, out_shardings=shardings)()


def bits(tree) -> list[bytes]:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def save(folder, *steps: int, keep=9) -> State:
  """Saves the same state at every step."""
  state = fresh()
  saver = checkpoint.Saver(folder, keep=keep, config=CONFIG, start_step=0)
  for step in steps:
    saver.save(step, state, {"epoch": [0], "row": [step]})
  saver.close()
  return state


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  """A folder with the whole checkpoints 3 and 6; not to be changed."""
  folder = tmp_path_factory.mktemp("run") / "checkpoints"
  save(folder, 3, 6)
  return folder


@pytest.fixture
def copy(two, tmp_path):
  """The same, to be damaged."""
  return shutil.copytree(two, tmp_path / "checkpoints")


def data_file(folder: pathlib.Path, step: int) -> pathlib.Path:
  """The file with the most bytes: arrays."""
  files = manifest.read(folder / str(step))["files"]
  return folder / str(step) / max(files, key=lambda name: files[name]["bytes"])


def test_restores_bitwise_on_another_mesh(two):
  other = placed(
    make_mesh(MeshConfig(fsdp=2, tensor=2)), PartitionSpec("tensor", "fsdp")
  )
  restored = checkpoint.restore_latest(two, other)
  assert restored.step == 6
  assert restored.data == {"epoch": [0], "row": [6]}
  assert restored.config == CONFIG
  assert bits(restored.state) == bits(fresh())
  assert type(restored.state.model) is Layer
  places = [leaf.sharding for leaf in jax.tree.leaves(restored.state)]
  assert places == [leaf.sharding for leaf in jax.tree.leaves(other)]


def test_restores_a_part(two):
  model = checkpoint.restore(two, 3, placed().model, part="model").state
  assert bits(model) == bits(fresh().model)


def test_what_is_donated_right_after_a_save_is_saved_as_it_was(tmp_path):
  state = fresh()
  before = bits(state)
  saver = checkpoint.Saver(tmp_path, keep=9, config=CONFIG, start_step=0)
  spoil = jax.jit(
    lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0
  )
  for step in range(1, 6):
    saver.save(step, state, {})
    spoilt = spoil(state)
    state = fresh()
    del spoilt
  saver.close()
  for step in range(1, 6):
    assert bits(checkpoint.restore(tmp_path, step, placed()).state) == before


def test_keeps_the_newest(tmp_path):
  save(tmp_path, 1, 2, 3, 4, keep=2)
  assert checkpoint.steps(tmp_path) == [3, 4]


def test_nothing_saved_is_nothing_restored(tmp_path):
  assert checkpoint.restore_latest(tmp_path / "absent", placed()) is None


def test_every_flipped_byte_is_noticed(copy):
  names = manifest.read(copy / "6")["files"]
  assert len(names) > 5
  for name in [*names, manifest.FILE]:
    path = copy / "6" / name
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = bytes([whole[middle] ^ 1])
    path.write_bytes(whole[:middle] + flipped + whole[middle + 1 :])
    with pytest.raises(checkpoint.DamagedCheckpointError, match=path.name):
      checkpoint.verify(copy, 6)
    path.write_bytes(whole)
  checkpoint.verify(copy, 6)


def flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 16
  path.write_bytes(data)


def truncate(path):
  path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
  ("harm", "what"),
  [
    (flip, "checksum differs"),
    (truncate, "bytes, written"),
    (pathlib.Path.unlink, "missing"),
  ],
)
def test_falls_back_to_the_newest_whole_one_and_says_so(
  copy, harm, what, caplog
):
  path = data_file(copy, 6)
  harm(path)
  with pytest.raises(ValueError, match=f"{path.name}: .*{what}"):
    checkpoint.restore(copy, 6, placed())
  restored = checkpoint.restore_latest(copy, placed())
  assert restored.step == 3
  assert bits(restored.state) == bits(fresh())
  assert path.name in caplog.text
  assert "Fell back to step 3" in caplog.text


def test_without_a_manifest_it_is_unfinished(copy, caplog):
  (copy / "6" / manifest.FILE).unlink()
  assert checkpoint.restore_latest(copy, placed()).step == 3
  assert "unfinished" in caplog.text


def test_all_damaged_is_an_error_not_a_fresh_start(copy):
  flip(data_file(copy, 3))
  truncate(data_file(copy, 6))
  with pytest.raises(ValueError, match=r"None of .*\[3, 6\].* is whole"):
    checkpoint.restore_latest(copy, placed())


def test_a_step_that_is_not_there(two):
  with pytest.raises(ValueError, match=r"no checkpoint .*/4; .*\[3, 6\]"):
    checkpoint.restore(two, 4, placed())


@pytest.mark.parametrize(
  ("wanted", "what"),
  [
    ({"dtype": jnp.bfloat16}, "dtype float32 in the checkpoint, bfloat16"),
    ({"rows": 24}, r"model.w.*: shape \[16, 8\] in the checkpoint, \[24, 8\]"),
  ],
)
def test_another_model_is_refused_and_the_difference_named(two, wanted, what):
  config = {"model": {"num_layers": 4, "rope": {"theta": 1e4}}, "seed": 4}
  with pytest.raises(ValueError, match=what) as error:
    checkpoint.restore_latest(two, placed(**wanted), config=config)
  text = str(error.value)
  assert "model.num_layers: 2 in the checkpoint, 4 here" in text
  assert "theta" not in text and "seed" not in text


def test_other_names_are_refused(two):
  wanted = placed()
  wanted = dataclasses.replace(wanted, moments=(wanted.moments[0], wanted.step))
  with pytest.raises(ValueError, match=r"moments\.1: not in the checkpoint"):
    checkpoint.restore(two, 6, wanted)
  with pytest.raises(ValueError, match=r"moments\.0\..*: only in the"):
    checkpoint.restore(two, 6, dataclasses.replace(wanted, moments=()))


def test_a_restart_puts_newer_and_unfinished_ones_out_of_the_way(copy, caplog):
  (copy / "9.orbax-checkpoint-tmp").mkdir()
  flip(data_file(copy, 6))
  saver = checkpoint.Saver(copy, keep=9, config=CONFIG, start_step=3)
  assert [p.name for p in copy.iterdir()] == ["3"]
  assert (copy.parent / "set_aside" / "6_0").is_dir()
  assert "set_aside" in caplog.text
  saver.save(6, fresh(), {})  # A step of that number can be saved again.
  assert saver.newest() == copy / "6"
  saver.close()
  assert bits(checkpoint.restore(copy, 6, placed()).state) == bits(fresh())


def test_the_manifest_is_plain_json(two):
  content = json.loads((two / "6" / manifest.FILE).read_text())
  assert content["step"] == 6
  assert content["config"] == CONFIG
  assert content["leaves"]["step"] == {"shape": [], "dtype": "int32"}
