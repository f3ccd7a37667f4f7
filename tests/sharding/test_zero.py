"""ZeRO's helpers: rules by name, and parts that meet layer by layer."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding import zero
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh

RULES = Rules(mlp=("fsdp", "tensor"))


@pytest.mark.parametrize(
  "function, whole_before",
  [(zero.parameter_rules, 3), (zero.gradient_rules, 2)],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_rules_of_a_stage(function, whole_before, stage):
  rules = function(RULES, stage)
  if stage >= whole_before:
    assert rules == RULES
    return
  assert rules.embed == () and rules.mlp == ("tensor",)
  # Rows are split over fsdp under every stage.
  assert rules.batch == RULES.batch
  assert rules.residual_seq == RULES.residual_seq


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(MeshConfig(data=2, fsdp=4))


def places(mesh):
  """Of three layers [3, 5, 8] and of one matrix [8, 7]."""
  specs = PartitionSpec(None, None, "fsdp"), PartitionSpec("fsdp")
  return [NamedSharding(mesh, spec) for spec in specs]


@pytest.mark.parametrize("replicas", [("fsdp",), ("data", "fsdp")])
def test_sums_over_fsdp(mesh, replicas):
  rng = np.random.default_rng(0)
  n = 8 if "data" in replicas else 4
  totals = [
    rng.integers(0, 9, shape).astype(np.float32)
    for shape in [(3, n, 5, 8), (n, 8, 7)]
  ]
  split = [
    NamedSharding(mesh, PartitionSpec(*spec))
    for spec in [(None, replicas), (replicas,)]
  ]
  # `data` is the outer of the two.
  shape = (-1, 4) if "data" in replicas else (4,)
  want = [
    totals[0].reshape(3, *shape, 5, 8).sum(len(shape)),
    totals[1].reshape(*shape, 8, 7).sum(len(shape) - 1),
  ]
  add = jax.jit(
    lambda totals: zero.sum_parts(totals, [True, False], places(mesh), replicas)
  )
  got = add(jax.device_put(totals, split))
  for ours, theirs in zip(got, want, strict=True):
    np.testing.assert_array_equal(ours, theirs)
    assert (
      ours.sharding.shard_shape(ours.shape)[-1 if ours is got[0] else -2] == 2
    )


def test_parts_become_whole(mesh):
  rng = np.random.default_rng(1)
  new = [rng.normal(size=(3, 5, 8)), rng.normal(size=(8, 7))]
  new = [x.astype(np.float32) for x in new]
  olds = [np.zeros_like(x) for x in new]
  whole = [NamedSharding(mesh, PartitionSpec())] * 2
  gather = jax.jit(
    lambda olds, parts: zero.gather(olds, parts, [True, False], whole),
    in_shardings=(whole, places(mesh)),
    out_shardings=whole,
  )
  for ours, theirs in zip(gather(olds, new), new, strict=True):
    np.testing.assert_array_equal(ours, theirs)
