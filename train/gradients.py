"""The gradient of a batch: micro-batches and replicas of the weights add up.

Sums of a loss and its gradient. What divides them is `train/step.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from model.execution import Execution
from sharding import zero
from sharding.axes import Rules
from sharding.compression import Residual
from sharding.rules import stacked, tree_shardings
from train import exchange, experts
from train import offload as host
from train.config import OffloadConfig
from train.objective import Batch, Metrics, Objective
from train.pipeline import Stages

# Folded into a step's key; rows of a batch have lower numbers.
_ROUNDING = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
  """What a step adds up over micro-batches and devices, float32."""

  loss: jax.Array
  weight: jax.Array
  aux: Metrics
  grads: Any


def gradient_sums(
  objective: Objective,
  model: nnx.Module,
  batch: Batch,
  key: jax.Array,
  execution: Execution,
  gradient_rules: Rules,
  parts: nnx.Module,
  accumulation: int,
  stages: Stages | None,
  compressed: exchange.Exchange | None,
  offload: OffloadConfig,
) -> tuple[Sums, Residual | None]:
  """Returns the sums of a batch and the gradient of the loss sum.

  And what compression owes to the gradients of later steps.
  """
  mesh, rules = execution.mesh, execution.rules
  places = tree_shardings(model, mesh, gradient_rules)
  if stages is not None:
    replicas = exchange.replica_axes(jax.tree.leaves(places), mesh, rules)
    micro_batches = {
      name: split_rows(x, execution, replicas, accumulation)
      for name, x in batch.items()
    }
    loss, aux, grads = stages.sums(
      objective, model, micro_batches, key, execution, replicas, places
    )
    return Sums(loss, objective.weight(batch), aux, grads), None

  loss = _minimised(objective, key)
  if offload.gradients:
    batch = {
      name: split_rows(x, execution, (), accumulation)[:, 0]
      for name, x in batch.items()
    }
    sums, grads = host.gradient_sums(
      lambda model, batch: loss(model, batch, execution),
      model,
      batch,
      parts,
    )
    return Sums(*sums, grads), None

  if accumulation == 1 and compressed is None:
    minimised, pull_back, sums = _vjp(loss, model, batch, execution)
    return Sums(*sums, *pull_back(jnp.ones_like(minimised))), None

  # Were all replicas of the gradient one program, XLA would reduce every
  # micro-batch. A vmap over the replicas gives each a gradient of its own; the
  # sum over them afterwards is the only reduction.
  replicas = exchange.replica_axes(jax.tree.leaves(places), mesh, rules)
  batch = {
    name: split_rows(x, execution, replicas, accumulation)
    for name, x in batch.items()
  }
  each, totals, dims = _added_up(
    loss, model, batch, execution, places, replicas
  )
  over = (0, 1) if replicas else 0
  sums = jax.tree.map(lambda x: jnp.sum(x, axis=over), each)
  owned = jax.tree.leaves(parts)
  if replicas[-1:] == ("fsdp",):
    totals = zero.sum_parts(totals, stacked(model), owned, replicas)
    replicas = replicas[:-1]
  residual = None
  if replicas and compressed is None:
    totals = map(jnp.sum, totals, dims)
  elif replicas:
    # The division belongs to the step, but what is owed is of means.
    weight = jnp.where(sums[1] > 0, sums[1], 1.0)
    totals, residual = compressed.sum(
      [total / weight for total in totals],
      dims,
      owned,
      replicas,
      key=jax.random.fold_in(key, _ROUNDING),
    )
    totals = [total * weight for total in totals]
  tree = jax.tree.structure(model)
  return Sums(*sums, tree.unflatten(totals)), residual


def replica_sums(
  objective: Objective,
  models: nnx.Module,
  batch: Batch,
  key: jax.Array,
  execution: Execution,
  parts: nnx.Module,
  accumulation: int,
  replicas: tuple[str, ...],
) -> Sums:
  """Returns the same of each replica's own weights and rows, [R, ...].

  Args:
    objective: what to minimise.
    models: the weights of R replicas, [R, ...].
    batch: of all of them.
    key: of dropout; rows of the batch differ in it.
    execution: how the model runs.
    parts: where the weights of one replica stand.
    accumulation: micro-batches a step.
    replicas: the mesh axes of R.
  """
  batch = {
    name: split_rows(x, execution, replicas, accumulation)
    for name, x in batch.items()
  }
  along = dict(in_axes=1, out_axes=1, spmd_axis_name=replicas)
  if experts.has_experts(models):
    weigh = lambda batch: experts.with_router_weights(
      batch, jnp.sum(jax.vmap(objective.weight)(batch))
    )
    batch = jax.vmap(weigh, **along)(batch)
  each, totals, dims = _added_up(
    _minimised(objective, key),
    models,
    batch,
    execution,
    parts,
    replicas,
    apart=True,
  )
  sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), each)
  totals = map(lambda total, dim: jnp.moveaxis(total, dim, 0), totals, dims)
  return Sums(*sums, jax.tree.structure(models).unflatten(totals))


def split_rows(
  x: jax.Array,
  execution: Execution,
  replicas: tuple[str, ...],
  accumulation: int,
) -> jax.Array:
  """Splits rows into [accumulation, replicas, rows of a micro-batch, ...].

  Every micro-batch takes its rows from every device, so none moves.
  """
  mesh, axes = execution.mesh, execution.rules.batch
  sizes = [mesh.shape[axis] for axis in axes]
  rows = len(x) // math.prod(sizes) // accumulation
  shards = [axis for axis in axes if axis not in replicas]
  order = [axes.index(axis) for axis in (*replicas, *shards)]
  order.insert(0, len(axes))
  order += range(len(axes) + 1, len(axes) + 1 + x.ndim)
  num_replicas = math.prod(mesh.shape[axis] for axis in replicas)
  rest = x.shape[1:]
  x = x.reshape(*sizes, accumulation, rows, *rest).transpose(order)
  x = x.reshape(accumulation, num_replicas, -1, *rest)
  spec = PartitionSpec(None, replicas or None, tuple(shards) or None)
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _minimised(objective: Objective, key: jax.Array) -> Callable:
  """(model, batch, execution) -> what to minimise, and the sums to report."""

  def loss(model, batch: Batch, execution: Execution):
    total, weight, aux = objective(model, batch, key, execution)
    minimised = total
    if experts.ROUTER in aux:
      stats = experts.batch_sums(aux[experts.ROUTER], batch)
      minimised += stats["loss"]
      aux = aux | {experts.ROUTER: stats}
    return minimised, (total, weight, aux)

  return loss


def _vjp(loss: Callable, model, batch: Batch, execution: Execution):
  of_model = functools.partial(loss, batch=batch, execution=execution)
  return jax.vjp(of_model, model, has_aux=True)


def _added_up(
  loss: Callable,
  model: nnx.Module,
  batch: Batch,
  execution: Execution,
  places: nnx.Module,
  replicas: tuple[str, ...],
  *,
  apart: bool = False,
) -> tuple[tuple, list[jax.Array], list[int]]:
  """Adds up the gradients of micro-batches, each replica its own.

  Args:
    loss: of `_minimised`.
    model: the weights, or those of every replica, [R, ...].
    batch: of `split_rows`.
    execution: how the model runs.
    places: of one replica's gradient.
    replicas: the mesh axes of R; (): one gradient, without its dim.
    apart: whether each replica has weights of its own.

  Returns:
    The other sums of every micro-batch and replica, [accumulation, R]; the
    gradients, leaf by leaf, with R in front or behind the dim of the layers;
    and that dim of each.
  """
  rules = execution.rules
  shards = tuple(axis for axis in rules.batch if axis not in replicas)
  inner = dataclasses.replace(
    execution, rules=dataclasses.replace(rules, batch=shards)
  )
  one = model
  if apart:
    one = jax.eval_shape(lambda: jax.tree.map(lambda w: w[0], model))
  # Replicas stand behind the dim of the layers, over which a scan runs: it
  # reads no reference by another dim than the first.
  dims = list(map(int, stacked(one)))
  grads = [
    jax.new_ref(_zeros(weight, place, dim, replicas))
    for weight, place, dim in zip(
      jax.tree.leaves(one), jax.tree.leaves(places), dims, strict=True
    )
  ]
  tree = jax.tree.structure(one)

  def micro(model, batch: Batch, grads: list):
    minimised, pull_back, sums = _vjp(loss, model, batch, inner)
    # In place, each layer's gradient as it is made: a micro-batch never has a
    # whole one beside the sum.
    pull_back.with_refs(tree.unflatten(grads))(jnp.ones_like(minimised))
    return sums

  if replicas:
    in_axes = (0 if apart else None, 0, dims)
    micro = jax.vmap(micro, in_axes=in_axes, spmd_axis_name=replicas)
  else:
    batch = jax.tree.map(lambda x: x[:, 0], batch)
  step = lambda carry, batch: (carry, micro(model, batch, grads))
  each = jax.lax.scan(step, None, batch)[1]
  return each, list(map(jax.freeze, grads)), dims


def _zeros(
  weight: jax.Array, place: NamedSharding, dim: int, replicas: tuple[str, ...]
) -> jax.Array:
  """The start of a gradient's sum, one for each replica along `dim`."""
  shape, mesh = list(weight.shape), place.mesh
  spec = list(place.spec) + [None] * (weight.ndim - len(place.spec))
  if replicas:
    shape.insert(dim, math.prod(mesh.shape[axis] for axis in replicas))
    spec.insert(dim, replicas)
  return jax.lax.with_sharding_constraint(
    jnp.zeros(shape, weight.dtype), NamedSharding(mesh, PartitionSpec(*spec))
  )
