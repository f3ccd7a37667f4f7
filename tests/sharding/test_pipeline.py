"""The executor against plain autodiff of the same little network."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding import schedules
from sharding.axes import MeshConfig
from sharding.mesh import make_mesh
from sharding.pipeline import run
from sharding.pipeline_actions import Parts
from tests.tolerances import tolerance

D, T, ROWS, VOCAB = 12, 5, 2, 7


def first(ends, batch):
  """Rows of a table."""
  one_hot = jax.nn.one_hot(batch["tokens"], VOCAB)
  return jnp.einsum("btv,vd->btd", one_hot, ends["table"])


def layers(chunk, x, batch, v):
  """Layers that add to the loss, as routers of experts do."""
  del v

  def layer(x, w):
    return x + jnp.tanh(jnp.einsum("btd,de->bte", x, w)), None

  x, _ = jax.lax.scan(layer, x, chunk)
  squares = jnp.sum(jnp.square(x))
  return x, 0.01 * batch["weight"] * squares, {"squares": squares}


def last(ends, x, batch):
  """A head, tied to the table."""
  logits = jnp.einsum("btd,vd->btv", x, ends["table"]) * ends["scale"]
  loss = batch["weight"] * jnp.sum(jax.nn.logsumexp(logits, axis=-1))
  return loss, {"logsumexp": loss}


PARTS = Parts(first=first, layers=layers, last=last)


def data(num_layers: int, num_micro: int, replicas: int):
  """Weights, ends and micro-batches [M, replicas, ...]."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(0, 0.4, shape).astype(np.float32)
  ends = {"table": normal(VOCAB, D), "scale": normal()}
  shape = num_micro, replicas
  batches = {
    "tokens": rng.integers(0, VOCAB, (*shape, ROWS, T)),
    "weight": rng.uniform(0.5, 1.5, shape).astype(np.float32),
  }
  return normal(num_layers, D, D), ends, batches


def plain(num_virtual: int, weights, ends, batches):
  """The loss sum by itself."""

  def loss(batch):
    total, x = 0.0, first(ends, batch)
    for chunk in jnp.split(weights, num_virtual):
      x, added, _ = layers(chunk, x, batch, 0)
      total += added
    return total + last(ends, x, batch)[0]

  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)
  return jnp.sum(jax.vmap(loss)(flat))


SCHEDULES = {
  "gpipe": (schedules.gpipe, 4, 3),
  "1f1b": (schedules.one_forward_one_backward, 4, 6),
  "two stages": (schedules.one_forward_one_backward, 2, 3),
  "interleaved": (functools.partial(schedules.interleaved, num_chunks=3), 2, 4),
  "zero_bubble": (schedules.zero_bubble, 4, 5),
  "evaluation": (functools.partial(schedules.evaluation, num_chunks=2), 4, 5),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_autodiff(name):
  build, P, M = SCHEDULES[name]
  schedule = build(P, M)
  num_virtual = schedule.num_virtual
  mesh = make_mesh(MeshConfig(pipeline=P, data=2, fsdp=1))
  weights, ends, batches = data(2 * num_virtual, M, 2)
  order = np.arange(2 * num_virtual)
  order = order.reshape(-1, P, 2).swapaxes(0, 1).reshape(-1)
  placed = jax.device_put(
    weights[order], NamedSharding(mesh, PartitionSpec("pipeline"))
  )
  step = functools.partial(
    run, schedule, PARTS, mesh=mesh, axis="pipeline", replicas=("data",)
  )
  sums = jax.jit(step)(placed, ends, batches)
  gradient = jax.value_and_grad(functools.partial(plain, num_virtual), (0, 1))
  loss, (d_weights, d_ends) = jax.jit(gradient)(weights, ends, batches)
  close = functools.partial(np.testing.assert_allclose, **tolerance("mesh"))
  close(sums.loss, loss)
  # What layers and what the last stage report are apart.
  assert 0 < sums.aux["logsumexp"] < sums.loss
  if name == "evaluation":
    assert sums.chunks is None and sums.ends is None
    return
  far = lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
  bound = tolerance("mesh")["rtol"]
  assert far(sums.chunks, d_weights[order]) < bound
  for key in ends:
    assert far(sums.ends[key], d_ends[key]) < bound


def kept(name: str, num_micro: int) -> int:
  """Bytes that a step holds beside its arguments, in inputs of a stage."""
  build, P, _ = SCHEDULES[name]
  schedule = build(P, num_micro)
  mesh = make_mesh(MeshConfig(pipeline=P, fsdp=1), devices=jax.devices()[:P])
  big = dataclasses.replace(PARTS, first=wide_first)
  weights, ends, batches = data(P, num_micro, 1)
  rows = {"tokens": np.zeros((num_micro, 1, 64, 32), np.int32)}
  step = jax.jit(
    functools.partial(run, schedule, big, mesh=mesh, axis="pipeline")
  )
  compiled = step.lower(weights, ends, batches | rows).compile()
  return compiled.memory_analysis().temp_size_in_bytes / (64 * 32 * D * 4)


def wide_first(ends, batch):
  """Without an array of the vocabulary, which would hide the rest."""
  tokens = batch["tokens"][..., None].astype(jnp.float32)
  return tokens * ends["table"][0][None, None]


def test_gpipe_keeps_micro_batches_and_1f1b_stages():
  """As the compiler plans it: one more input for each, or none at all."""
  grown = kept("gpipe", 40) - kept("gpipe", 8)
  np.testing.assert_allclose(grown, 32, atol=1)
  assert abs(kept("1f1b", 40) - kept("1f1b", 8)) < 1
  assert abs(kept("zero_bubble", 40) - kept("zero_bubble", 8)) < 1
