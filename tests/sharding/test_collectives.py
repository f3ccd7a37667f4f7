"""Collectives: values against numpy, costs against the bytes of rings.

A compiler does not say what an instruction sends. So each collective is also
written as the ring of permutes that its formula describes, and their bytes
are counted: a permute sends what it is given.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharding import collectives as c
from sharding.axes import MeshConfig
from sharding.hlo import collectives
from sharding.mesh import make_mesh
from tests.tolerances import tolerance

SIZES = (2, 4, 8)
ROWS, COLUMNS = 48, 5
AXIS = "context"


def run(function, num_devices):
  """A function of one device's rows: its results, and its collectives."""
  mesh = make_mesh(MeshConfig(fsdp=1, context=num_devices))
  x = np.arange(num_devices * ROWS * COLUMNS, dtype=np.float32)
  x = x.reshape(-1, COLUMNS) % 101
  mapped = jax.shard_map(
    function,
    mesh=mesh,
    in_specs=PartitionSpec(AXIS),
    out_specs=PartitionSpec(AXIS),
    check_vma=False,
  )
  compiled = jax.jit(mapped).lower(x).compile()
  parts = np.split(x, num_devices)
  results = np.split(np.asarray(compiled(x)), num_devices)
  return parts, results, collectives(compiled.as_text(), mesh)


def shift(x, n):
  """To the next device of a ring."""
  return c.permute(x, AXIS, [(i, (i + 1) % n) for i in range(n)])


def ring_reduce_scatter(x, n):
  """Sums travel; each ends at its owner."""
  parts = jnp.stack(jnp.split(x, n))
  me = jax.lax.axis_index(AXIS)
  total = parts[(me - 1) % n]
  for hop in range(1, n):
    total = shift(total, n) + parts[(me - 1 - hop) % n]
  return total


def ring_all_gather(x, n):
  """Parts travel; each device keeps a copy of all."""
  me = jax.lax.axis_index(AXIS)
  whole = jnp.zeros((n, *x.shape), x.dtype).at[me].set(x)
  for hop in range(1, n):
    x = shift(x, n)
    whole = whole.at[(me - hop) % n].set(x)
  return whole.reshape(-1, *x.shape[1:])


def ring_all_reduce(x, n):
  return ring_all_gather(ring_reduce_scatter(x, n), n)


def pairwise_all_to_all(x, n):
  """In hop h, each device sends straight to the h-th after it."""
  parts = jnp.stack(jnp.split(x, n))
  me = jax.lax.axis_index(AXIS)
  out = jnp.zeros_like(parts).at[me].set(parts[me])
  for hop in range(1, n):
    pairs = [(i, (i + hop) % n) for i in range(n)]
    got = c.permute(parts[(me + hop) % n], AXIS, pairs)
    out = out.at[(me - hop) % n].set(got)
  return out.reshape(x.shape)


def cut(parts, n):
  """[device][target] -> that part of its rows."""
  return [np.split(part, n) for part in parts]


# kind -> (function, the same in permutes, cost, results by numpy)
CASES = {
  "all-reduce": (
    functools.partial(c.all_reduce, axis=AXIS),
    ring_all_reduce,
    c.all_reduce_bytes,
    lambda parts, n: [sum(parts)] * n,
  ),
  "all-gather": (
    functools.partial(c.all_gather, axis=AXIS, dim=0),
    ring_all_gather,
    c.all_gather_bytes,
    lambda parts, n: [np.concatenate(parts)] * n,
  ),
  "reduce-scatter": (
    functools.partial(c.reduce_scatter, axis=AXIS, dim=0),
    ring_reduce_scatter,
    c.reduce_scatter_bytes,
    lambda parts, n: np.split(sum(parts), n),
  ),
  "all-to-all": (
    functools.partial(c.all_to_all, axis=AXIS, split_dim=0, join_dim=0),
    pairwise_all_to_all,
    c.all_to_all_bytes,
    lambda parts, n: [
      np.concatenate([rows[i] for rows in cut(parts, n)]) for i in range(n)
    ],
  ),
}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", CASES)
def test_formula_equals_the_bytes_in_hlo(kind, n):
  function, ring, cost, _ = CASES[kind]
  own = ROWS * COLUMNS * 4
  want = cost(own * n if kind == "all-gather" else own, n)
  _, _, (op,) = run(function, n)
  assert (op.kind, op.group_size, op.axes) == (kind, n, {AXIS})
  assert op.bytes_sent == pytest.approx(want)
  _, _, hops = run(lambda x: ring(x, n), n)
  assert {hop.kind for hop in hops} == {"collective-permute"}
  put_in = [shape.num_bytes for hop in hops for shape in hop.operands]
  assert sum(put_in) == pytest.approx(want)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", CASES)
def test_values(kind, n):
  function, ring, _, by_numpy = CASES[kind]
  for form in (function, lambda x: ring(x, n)):
    parts, results, _ = run(form, n)
    for ours, theirs in zip(results, by_numpy(parts, n), strict=True):
      np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("n", SIZES)
def test_permute(n):
  pairs = [(i, i + 1) for i in range(n - 1)]
  parts, results, (op,) = run(lambda x: c.permute(x, AXIS, pairs), n)
  own = parts[0].nbytes
  assert (op.kind, op.bytes_sent) == ("collective-permute", own)
  assert c.permute_bytes(own, n) == own
  want = [np.zeros_like(parts[0]), *parts[:-1]]
  np.testing.assert_array_equal(results, want)


def loss(w, x, gather=lambda w: w):
  """Three layers; each gathers its weights, again in the backward pass."""
  layer = lambda x, w: (jnp.tanh(x @ gather(w)), None)
  return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, w)[0])


def gradient(stage, n):
  """The bytes of three layers' weights, and those that their gradient sends.

  Rows of x are split; the weights lie as the stage keeps them.
  """

  def local(w, x):
    if stage == 3:
      return jax.grad(loss)(w, x, lambda w: c.all_gather(w, AXIS, dim=0))
    grads = jax.grad(loss)(w, x)
    if stage == 0:
      return c.all_reduce(grads, AXIS)
    # Between the two stands the update of a device's own part.
    return c.all_gather(c.reduce_scatter(grads, AXIS, dim=1), AXIS, dim=1)

  mesh = make_mesh(MeshConfig(fsdp=1, context=n))
  place = PartitionSpec(None, AXIS if stage == 3 else None)
  mapped = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(place, PartitionSpec(AXIS)),
    out_specs=place,
    check_vma=False,
  )
  w = np.linspace(-1, 1, 3 * 8 * 8, dtype=np.float32).reshape(3, 8, 8)
  x = np.linspace(-1, 1, n * 3 * 8, dtype=np.float32).reshape(-1, 8)
  compiled = jax.jit(mapped).lower(w, x).compile()
  want = jax.grad(loss)(w, x)
  far = np.linalg.norm(compiled(w, x) - want) / np.linalg.norm(want)
  assert far < tolerance("mesh")["rtol"]
  found = collectives(compiled.as_text(), mesh)
  return w.nbytes, sum(op.bytes_sent for op in found)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bytes_of_a_zero_stage(stage, n):
  num_bytes, sent = gradient(stage, n)
  assert sent == pytest.approx(c.zero_bytes(num_bytes, n, stage=stage))


def test_stage_3_sends_half_as_much_again_as_data_parallel():
  for n in SIZES:
    plain = c.zero_bytes(1e6, n, stage=0)
    assert c.zero_bytes(1e6, n, stage=1) == pytest.approx(plain)
    assert c.zero_bytes(1e6, n, stage=2) == pytest.approx(plain)
    assert c.zero_bytes(1e6, n, stage=3) == pytest.approx(1.5 * plain)
  with pytest.raises(ValueError, match="0 to 3"):
    c.zero_bytes(1.0, 2, stage=4)
