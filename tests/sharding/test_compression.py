"""Compressed sums: few bytes in compiled HLO, and nothing lost over steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharding import compression
from sharding.axes import MeshConfig
from sharding.compression import Int8, Largest, Signs
from sharding.hlo import collectives
from sharding.mesh import make_mesh

N, SIZE = 4, 5000  # No multiple of any block.
ROWS = PartitionSpec("data")


def mesh_of(num_devices):
  return make_mesh(MeshConfig(data=num_devices, fsdp=1))


def summing(form, num_devices=N, size=SIZE, feedback=False):
  """Returns jitted (vectors [N, size], keys [N], residuals) -> the same."""

  def one(x, key, residual):
    residual = jax.tree.map(lambda r: r[0], residual)
    total, residual = compression.all_reduce(
      x[0], "data", form, key=key[0], residual=residual
    )
    return total[None], jax.tree.map(lambda r: r[None], residual)

  summed = jax.jit(
    jax.shard_map(
      one,
      mesh=mesh_of(num_devices),
      in_specs=ROWS,
      out_specs=ROWS,
      check_vma=False,
    )
  )
  start = None
  if feedback:
    start = compression.no_residual(size, num_devices, form)
    start = jax.tree.map(lambda r: jnp.stack([r] * num_devices), start)
  return summed, start


def vectors(seed=0, num_devices=N, size=SIZE):
  return (
    np.random.default_rng(seed)
    .normal(size=(num_devices, size))
    .astype(np.float32)
  )


def keys(seed=0, num_devices=N):
  return jax.random.split(jax.random.key(seed), num_devices)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize(
  ("form", "most"), [(Int8(), 0.27), (Signs(), 0.05), (Largest(), 0.05)]
)
def test_bytes_on_the_wire(form, most, num_devices):
  """Scales and places are counted."""
  size = 1 << 16
  mesh = mesh_of(num_devices)
  shapes = (vectors(0, num_devices, size), keys(0, num_devices))

  def sent(function, *arguments):
    hlo = function.lower(*arguments).compile().as_text()
    return sum(c.bytes_sent for c in collectives(hlo, mesh))

  summed, none = summing(form, num_devices, size)
  plain = jax.shard_map(
    lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=ROWS, out_specs=ROWS
  )
  ratio = sent(summed, *shapes, none) / sent(jax.jit(plain), shapes[0])
  assert 0.5 * most / 4 < ratio <= most


@pytest.mark.parametrize("form", [Int8(), Signs(), Largest()])
def test_all_devices_get_the_same_bits(form):
  summed, none = summing(form)
  totals = np.asarray(summed(vectors(), keys(), none)[0])
  for other in totals[1:]:
    np.testing.assert_array_equal(totals[0], other)
  assert np.abs(totals).max() > 0


def test_int8_is_right_in_expectation():
  x = vectors()
  summed, none = summing(Int8())
  totals = np.stack(
    [np.asarray(summed(x, keys(seed), none)[0])[0] for seed in range(200)]
  )
  exact = x.sum(axis=0)
  # A step of the sum is the largest of a block, about 4 N^0.5, over 127.
  assert 0.01 < np.abs(totals[0] - exact).max() < 0.2
  # The mean of 200 is nearer by the root of it: 5 sigma of a step's third.
  spread = totals.std(axis=0) / np.sqrt(len(totals))
  assert np.abs((totals.mean(axis=0) - exact) / spread).max() < 5


def test_int8_of_nothing_and_of_one_size():
  summed, none = summing(Int8())
  zeros = np.zeros((N, SIZE), np.float32)
  np.testing.assert_array_equal(summed(zeros, keys(), none)[0], zeros)
  np.testing.assert_allclose(
    summed(zeros - 3, keys(), none)[0], zeros - 3 * N, rtol=1e-6
  )


@pytest.mark.parametrize("form", [Int8(), Signs(), Largest()])
def test_what_is_lost_is_owed(form):
  """All sums and what is owed add up to all that was put in."""
  summed, residual = summing(form, feedback=True)
  exact = np.zeros(SIZE)
  found = np.zeros(SIZE)
  for step in range(5):
    x = vectors(step)
    total, residual = summed(x, keys(step), residual)
    exact += x.sum(axis=0, dtype=np.float64)
    found += np.asarray(total)[0]
  sent = np.asarray(residual.sent).sum(axis=0).ravel()[:SIZE]
  summed_up = np.asarray(residual.summed).ravel()[:SIZE]
  np.testing.assert_allclose(found + sent + summed_up, exact, atol=1e-4)
  # Without them nothing like it, but for int8.
  far = np.linalg.norm(found - exact) / np.linalg.norm(exact)
  assert far < 0.05 if isinstance(form, Int8) else far > 0.1


@functools.cache
def regression():
  """A least-squares problem, its rows split over N devices."""
  rng = np.random.default_rng(3)
  inputs = rng.normal(size=(N, 400, 32)).astype(np.float32)
  # Devices disagree: at the optimum of all, none has gradient 0.
  wanted = rng.normal(size=(N, 32)).astype(np.float32)
  targets = np.einsum("nij,nj->ni", inputs, wanted)
  exact = np.linalg.lstsq(inputs.reshape(-1, 32), targets.ravel(), rcond=None)[
    0
  ]
  return inputs, targets, exact


@pytest.mark.parametrize("form", [Signs(block=32), Largest(block=32, keep=4)])
def test_descent_needs_error_feedback(form):
  inputs, targets, exact = regression()

  def distance(feedback):
    summed, residual = summing(form, size=32, feedback=feedback)
    w = np.zeros(32, np.float32)
    for step in range(1000):
      errors = inputs @ w - targets
      grads = np.einsum("nij,ni->nj", inputs, errors) / 400 / N
      total, residual = summed(grads, keys(step), residual)
      w = w - 0.05 * (1 - step / 1000) * np.asarray(total)[0]
    return np.linalg.norm(w - exact) / np.linalg.norm(exact)

  assert distance(feedback=True) < 0.01
  assert distance(feedback=False) > 0.05
