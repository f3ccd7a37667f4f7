"""Collectives in HLO: a recorded program of a TPU, and one compiled here."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from sharding.hlo import KINDS, Collective, Shape, collectives, summary

# The gradient of three layers tanh(x a) b, weights split over fsdp = 4, rows
# over data = 2 and fsdp, and a permute after them: v5e:2x4, jax 0.10.2, bf16.
# Cut: computations without collectives, layouts and metadata.
SAMPLE = pathlib.Path(__file__).with_name("tpu_sample.hlo")


@pytest.fixture(scope="module")
def mesh():
  return jax.make_mesh(
    (2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
  )


def op(kind, dims, axes, size, times, cycles=None) -> Collective:
  shapes = dims if isinstance(dims, list) else [dims]
  return Collective(
    kind=kind,
    operands=tuple(Shape("bf16", dims) for dims in shapes),
    axes=frozenset([axes]),
    group_size=size,
    times=times,
    in_loop=times > 1,
    in_branch=False,
    asynchronous=cycles is not None,
    hidden_cycles=cycles or 0,
  )


# Read with the eye. The async gather stands in four computations.
WANTED = [
  op("all-gather", (1, 128, 1024), "fsdp", 4, 3),
  op("all-gather", (1, 256, 512), "fsdp", 4, 3),
  op("all-gather", (64, 512), "fsdp", 4, 3),
  op("all-gather", (128, 1024), "fsdp", 4, 3, cycles=3101 + 3074 + 2397),
  op("all-to-all", (1, 4, 64, 256), "fsdp", 4, 3),
  op("reduce-scatter", [(512, 1024), (1024, 512)], "fsdp", 4, 3),
  op("all-reduce", [(1, 128, 1024), (1, 256, 512)], "data", 2, 3),
  op("collective-permute", (64, 512), "fsdp", 2, 1),
  op("collective-permute", (64, 512), "fsdp", 2, 1),
]


def test_every_form_of_the_tpu_compiler_counts_once(mesh):
  found = collectives(SAMPLE.read_text(), mesh)
  order = lambda ops: sorted(map(repr, ops))
  assert order(found) == order(WANTED)


def test_summary_adds_calls_and_bytes(mesh):
  table = summary(collectives(SAMPLE.read_text(), mesh))
  # bf16; a gather sends N-1 times what a device puts in.
  gathered = 128 * 1024 + 256 * 512 + 64 * 512 + 128 * 1024
  assert table["all-gather bf16 over fsdp"] == [12, 3 * gathered * 2 * 3]
  whole = 2 * 512 * 1024 * 2
  scattered = 3 * whole * 3 // 4
  assert table["reduce-scatter bf16 over fsdp"] == [3, scattered]
  assert table["collective-permute bf16 over fsdp"] == [2, 2 * 64 * 512 * 2]
  assert len(table) == 5


def test_unknown_number_of_iterations(mesh):
  text = SAMPLE.read_text().replace("constant(3)", "constant(...)")
  with pytest.raises(ValueError, match="fixed length"):
    collectives(text, mesh)


def test_all_kinds_in_nested_loops_compiled_here(mesh):
  """Counted by hand: 3 x 5 iterations inside, 3 outside."""

  def local(x):
    def inner(x, _):
      whole = jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)
      part = jax.lax.psum_scatter(
        whole, "fsdp", scatter_dimension=0, tiled=True
      )
      return part + jax.lax.psum(x, ("data", "fsdp")), None

    def outer(x, _):
      x = jax.lax.scan(inner, x, None, length=5)[0]
      x = jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])
      return jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True), None

    return jax.lax.scan(outer, x, None, length=3)[0]

  rows = PartitionSpec(("data", "fsdp"))
  mapped = jax.shard_map(
    local, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
  )
  x = jnp.ones((64, 6), jnp.int32)
  text = jax.jit(mapped).lower(x).compile().as_text()
  found = {op.kind: op for op in collectives(text, mesh)}
  assert found.keys() == KINDS.keys()
  times = {kind: op.times for kind, op in found.items()}
  inside = dict.fromkeys(["all-gather", "reduce-scatter", "all-reduce"], 15)
  assert times == inside | {"collective-permute": 3, "all-to-all": 3}
  assert found["all-reduce"].axes == {"data", "fsdp"}
  assert found["collective-permute"].axes == {"data"}
  elements = {kind: op.num_elements for kind, op in found.items()}
  assert elements == dict.fromkeys(KINDS, 8 * 6) | {
    "reduce-scatter": 32 * 6,
  }
  assert found["all-gather"].bytes_sent == 15 * 3 * 8 * 6 * 4


@pytest.mark.parametrize(
  "shape, want",
  [
    (Shape("f32", (3, 5)), 60),
    (Shape("bf16", (7,)), 14),
    (Shape("s4", (6,)), 3),
    (Shape("f8e4m3fn", (6,)), 6),
    (Shape("pred", ()), 1),
    (Shape("c64", (2,)), 16),
  ],
)
def test_bytes_of_a_dtype(shape, want):
  assert shape.num_bytes == want
  assert np.isscalar(want)
