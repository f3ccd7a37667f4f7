"""How kernels cut their work."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import tiles, tuning
from pallas_kernels.flash_attention.options import Options, Rows
from pallas_kernels.flash_attention.tpu_plan import Plan
from pallas_kernels.flash_attention.tpu_specs import (
  cost,
  first_block,
  last_chunk,
)
from tests.pallas_kernels.flash_attention import oracle

SIDE = st.none() | st.integers(0, 40)


def options(left, right) -> Options:
  return Options(
    left=left,
    right=right,
    scale=1.0,
    soft_cap=None,
    dropout_rate=0.0,
    operands="float32",
    out_dtype="float32",
  )


def plan(left, right, *, offset=0, num_keys=64, block=8, chunk=16) -> Plan:
  return Plan(
    options=options(left, right),
    block_q=block,
    block_k=block,
    step=block,
    chunk_k=chunk,
    offset=offset,
    num_keys=num_keys,
    segmented=False,
  )


@hypothesis.given(
  direction=st.sampled_from(["forward", "backward"]),
  T=st.integers(1, 70_000),
  S=st.integers(1, 70_000),
  H=st.sampled_from([16, 64, 80, 128, 256]),
  operand_bytes=st.sampled_from([2, 4]),
  chip=st.sampled_from(["v4", "v5e", "v5p", "v6e"]),
)
def test_blocks_of_any_shape(direction, T, S, H, operand_bytes, chip):
  got = tuning.find(direction, T, S, H, operand_bytes, chip)
  for block in (got["block_q"], got["block_k"], got["step"]):
    assert block % 128 == 0
  assert got["block_q"] % got["step"] == 0
  assert got["chunk_k"] % got["block_k"] == 0
  # A tile is never mostly filling; a chunk fits what backward has for it.
  assert got["block_q"] < T + 128
  assert got["block_k"] < S + 128
  chunks = -(-S // got["chunk_k"])
  assert chunks * got["chunk_k"] < S + chunks * got["block_k"]
  most = 8192 if direction == "backward" else 65536 // operand_bytes
  assert got["chunk_k"] * max(H, 128) <= max(most * 128, got["block_k"] * 256)


@hypothesis.given(SIDE, SIDE, st.integers(-20, 40), st.integers(1, 64))
def test_cost_counts_what_is_seen(left, right, offset, num_keys):
  q = jax.ShapeDtypeStruct((2, 3, 24, 16), jnp.float32)
  seen = oracle.seen(24, num_keys, left, right, offset=offset).sum()
  got = cost(plan(left, right, offset=offset, num_keys=num_keys), q, 2, 0)
  assert got.flops == 2 * 2 * 16 * 2 * 3 * seen
  assert got.transcendentals == 2 * 3 * seen


@hypothesis.given(SIDE, SIDE, st.integers(0, 40))
def test_nothing_seen_is_left_unread(left, right, offset):
  this = plan(left, right, offset=offset)
  seen = oracle.seen(64, 64, left, right, offset=offset)[0]
  seen = seen.reshape(8, 8, 4, 16).any(axis=(1, 3))  # [blocks, chunks]
  for block, chunk in np.argwhere(seen):
    assert int(last_chunk(this, block, chunk)) == chunk
    assert int(first_block(this, block, chunk, 8)) == block


@pytest.mark.parametrize("with_segments", [False, True])
@hypothesis.given(SIDE, SIDE, st.integers(0, 2**20))
def test_ranges_tell_what_a_tile_holds(with_segments, left, right, seed):
  """Never too little; and exactly, where positions count up."""
  rng = np.random.default_rng(seed)
  T, block = 32, 8
  index = np.arange(T)[None] + int(rng.integers(0, 9))
  if seed % 2:
    index = rng.integers(0, 40, (1, T))
  ids = None
  if with_segments:
    ids = np.sort(rng.integers(0, 4, (1, T)))
  rows = Rows(jnp.asarray(index), None if ids is None else jnp.asarray(ids))
  found = tiles.ranges(rows, block, 1, counted=False)
  seen = oracle.seen(
    T,
    T,
    left,
    right,
    q_positions=index,
    k_positions=index,
    q_segment_ids=ids,
    k_segment_ids=ids,
  )[0].reshape(4, block, 4, block)
  for i in range(4):
    for j in range(4):
      of = lambda n: jax.tree.map(lambda x: x[0, n], found)
      some, every = tiles.holds(options(left, right), of(i), of(j))
      tile = seen[i, :, j]
      assert bool(some) or not tile.any()
      assert bool(every) == tile.all()
      if not with_segments and not seed % 2:
        assert bool(some) == tile.any()
