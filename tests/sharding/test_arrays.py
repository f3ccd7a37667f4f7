"""Host arrays to global arrays: each row on its device, none lost."""

import numpy as np
import pytest

from sharding import arrays
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh

RULES = Rules()


def batch_of(rows: int) -> dict[str, np.ndarray]:
  tokens = np.arange(rows * 5, dtype=np.int32).reshape(rows, 5)
  return {"tokens": tokens, "reward": np.arange(rows, dtype=np.float32)}


@pytest.mark.parametrize(
  "config", [MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)]
)
def test_rows_land_in_order(config):
  mesh = make_mesh(config)
  batch = batch_of(16)
  placed = arrays.to_global(batch, mesh, RULES)
  for name, array in batch.items():
    assert placed[name].dtype == array.dtype
    np.testing.assert_array_equal(placed[name], array)
    for shard in placed[name].addressable_shards:
      # The device's place in the (data, fsdp) grid names its rows.
      _, data, fsdp, *_ = np.argwhere(mesh.devices == shard.device)[0]
      part = data * mesh.shape["fsdp"] + fsdp
      rows = 16 // (mesh.shape["data"] * mesh.shape["fsdp"])
      np.testing.assert_array_equal(
        shard.data, array[part * rows : (part + 1) * rows]
      )


def test_one_process_reads_all_rows():
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  assert arrays.process_rows(12, mesh, RULES) == slice(0, 12)


class FakeProcess:
  """The batch placement as process `index` of `count` would see it."""

  def __init__(self, placement, index, count):
    self.placement, self.index, self.count = placement, index, count

  def addressable_devices_indices_map(self, shape):
    every = self.placement.devices_indices_map(shape)
    share = len(every) // self.count
    first = self.index * share
    return {d: i for d, i in every.items() if first <= d.id < first + share}


@pytest.mark.parametrize(
  "config, count, want",
  [
    (MeshConfig(data=2, fsdp=4), 2, [(0, 12), (12, 24)]),
    (MeshConfig(data=2, fsdp=4), 4, [(0, 6), (6, 12), (12, 18), (18, 24)]),
    # Tensor parallelism across processes: pairs of them read the same rows.
    (MeshConfig(fsdp=2, tensor=4), 4, [(0, 12), (0, 12), (12, 24), (12, 24)]),
  ],
)
def test_rows_of_each_process(monkeypatch, config, count, want):
  mesh = make_mesh(config)
  placement = arrays.batch_sharding(mesh, RULES)
  for index, (start, stop) in enumerate(want):
    fake = FakeProcess(placement, index, count)
    monkeypatch.setattr(arrays, "batch_sharding", lambda *_, fake=fake: fake)
    assert arrays.process_rows(24, mesh, RULES) == slice(start, stop)


def test_batch_that_does_not_divide():
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  with pytest.raises(ValueError) as error:
    arrays.to_global(batch_of(6), mesh, RULES)
  for part in ("global_batch_size=6", "4 (mesh.data=2 x mesh.fsdp=2)"):
    assert part in str(error.value)
  with pytest.raises(ValueError) as error:
    arrays.check_batch_size(12, mesh, RULES, accumulation=3, rows_per_example=2)
  assert "accumulation=3 x rows per example=2" in str(error.value)
  arrays.check_batch_size(24, mesh, RULES, accumulation=3, rows_per_example=2)


def test_fields_of_different_rows():
  batch = batch_of(8)
  batch["reward"] = batch["reward"][:4]
  with pytest.raises(ValueError, match=r"equal rows; got .*'reward': 4"):
    arrays.to_global(batch, make_mesh(MeshConfig()), RULES)


def test_the_step_finds_a_batch_where_it_declares_it():
  """Else jit would move every batch once more."""
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  placement = arrays.batch_sharding(mesh, RULES)
  for array in arrays.to_global(batch_of(8), mesh, RULES).values():
    assert array.sharding.is_equivalent_to(placement, array.ndim)
