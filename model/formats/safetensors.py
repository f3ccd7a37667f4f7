"""Safetensors files, single or sharded with an index."""

import json
import pathlib
from collections.abc import Iterable, Set

import ml_dtypes  # noqa: F401  gives numpy the bfloat16 that files may hold
import numpy as np
import safetensors
import safetensors.numpy

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
  """The tensors of a folder, memory mapped and read one at a time."""

  def __init__(self, folder):
    """Opens the files; reads their headers only.

    Raises:
      FileNotFoundError: the folder, or a file that its index names, is not
        there.
      ValueError: a file is damaged or does not hold what the index says.
    """
    folder = pathlib.Path(folder)
    if (folder / INDEX).exists():
      index = json.loads((folder / INDEX).read_text())["weight_map"]
    elif (folder / SINGLE).exists():
      index = None
    else:
      raise FileNotFoundError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    self._files = {}
    for file in sorted({SINGLE} if index is None else set(index.values())):
      opened = _open(folder / file)
      self._files |= dict.fromkeys(opened.keys(), opened)
    if index is not None and set(index) != set(self._files):
      differ = sorted(set(index) ^ set(self._files))
      raise ValueError(
        f"{folder / INDEX} and the files it names differ in {differ[:8]}"
      )

  def names(self) -> Set[str]:
    """Of all tensors."""
    return self._files.keys()

  def shape(self, name: str) -> tuple[int, ...]:
    """Of a tensor, without reading it."""
    return tuple(self._files[name].get_slice(name).get_shape())

  def read(self, name: str) -> np.ndarray:
    """A tensor in the dtype of the file."""
    return self._files[name].get_tensor(name)


def write(
  folder: pathlib.Path,
  tensors: Iterable[tuple[str, np.ndarray]],
  *,
  max_shard_bytes: int,
) -> None:
  """Writes tensors into a new file, or several and an index.

  Holds one shard in memory. Not atomic by itself: the caller writes into a
  folder of another name and renames it when all is there.

  Args:
    folder: exists.
    tensors: names and contiguous arrays.
    max_shard_bytes: a larger tensor gets a file of its own.
  """
  shards, shard, size = [], {}, 0

  def flush():
    file = folder / f"{len(shards)}.part"
    safetensors.numpy.save_file(shard, file, metadata={"format": "pt"})
    shards.append((file, {name: x.nbytes for name, x in shard.items()}))

  for name, array in tensors:
    if shard and size + array.nbytes > max_shard_bytes:
      flush()
      shard, size = {}, 0
    shard[name] = array
    size += array.nbytes
  flush()

  if len(shards) == 1:
    shards[0][0].rename(folder / SINGLE)
    return
  weight_map, total = {}, 0
  for i, (file, sizes) in enumerate(shards, start=1):
    name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
    file.rename(folder / name)
    weight_map |= dict.fromkeys(sizes, name)
    total += sum(sizes.values())
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def _open(path: pathlib.Path):
  if not path.exists():
    raise FileNotFoundError(f"{path} is named by {INDEX} but is not there")
  try:
    return safetensors.safe_open(path, framework="np")
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path} is damaged or cut short: {error}") from error
