import ml_dtypes
import numpy as np
import pytest

from model.formats import safetensors


def tensors():
  rng = np.random.default_rng(0)
  return {
    "a": rng.standard_normal((3, 5)).astype(np.float32),
    "b": rng.standard_normal(7).astype(ml_dtypes.bfloat16),
    "c": rng.standard_normal((2, 2, 11)).astype(np.float16),
  }


def written(folder, max_shard_bytes=10**9):
  safetensors.write(folder, tensors().items(), max_shard_bytes=max_shard_bytes)
  return sorted(path.name for path in folder.iterdir())


def test_single_file_reads_back_bitwise(tmp_path):
  assert written(tmp_path) == ["model.safetensors"]
  checkpoint = safetensors.Checkpoint(tmp_path)
  assert checkpoint.names() == set("abc")
  for name, value in tensors().items():
    assert checkpoint.shape(name) == value.shape
    read = checkpoint.read(name)
    assert read.dtype == value.dtype
    np.testing.assert_array_equal(read, value)


def test_shards_hold_at_most_the_size(tmp_path):
  # 60, 14 and 88 bytes: the first two share a file, the last exceeds it.
  assert written(tmp_path, max_shard_bytes=80) == [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
  ]
  checkpoint = safetensors.Checkpoint(tmp_path)
  for name, value in tensors().items():
    np.testing.assert_array_equal(checkpoint.read(name), value)


def test_absent_folder_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="holds neither"):
    safetensors.Checkpoint(tmp_path / "nowhere")


def test_absent_shard_is_named(tmp_path):
  written(tmp_path, max_shard_bytes=80)
  (tmp_path / "model-00002-of-00002.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
    safetensors.Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 30, 200])
def test_cut_file_is_named(tmp_path, keep):
  written(tmp_path)
  file = tmp_path / "model.safetensors"
  file.write_bytes(file.read_bytes()[:keep])
  with pytest.raises(ValueError, match="model.safetensors is damaged"):
    safetensors.Checkpoint(tmp_path)


def test_index_that_lies_is_refused(tmp_path):
  written(tmp_path, max_shard_bytes=80)
  index = tmp_path / "model.safetensors.index.json"
  index.write_text(index.read_text().replace('"a"', '"z"'))
  with pytest.raises(ValueError, match=r"differ in \['a', 'z'\]"):
    safetensors.Checkpoint(tmp_path)
