"""One training step: gradients of micro-batches, one division, one update.

A loss returns sums (see `Objective`). They are added up over micro-batches and
devices, and divided by the global weight here and nowhere else, so a step does
not depend on how the batch was split or packed.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from model.execution import Execution
from pallas_kernels.ring_attention.order import permutation
from sharding.arrays import batch_sharding, check_batch_size
from sharding.rules import replicated
from train import experts
from train.objective import Batch, Metrics, Objective
from train.optimizers import Optimizer, global_norm
from train.state import TrainState, step_key


@dataclasses.dataclass(frozen=True)
class TrainStep:
  """A jitted step, of a state or of its leaves.

  A state is a tree of modules. To take it apart and put it together is a third
  of a step's work for the host, so a loop holds the leaves and makes a state of
  them where somebody looks at it.

  Attributes:
    on_leaves: (leaves of a state, batch) -> (leaves of the next, metrics).
    tree: structure of a state.
  """

  on_leaves: Callable[[list, Batch], tuple[list, Metrics]]
  tree: jax.tree_util.PyTreeDef

  def __call__(
    self, state: TrainState, batch: Batch
  ) -> tuple[TrainState, Metrics]:
    """Takes one step; `state` is donated."""
    leaves, metrics = self.on_leaves(jax.tree.leaves(state), batch)
    return self.tree.unflatten(leaves), metrics


def make_train_step(
  objective: Objective,
  optimizer: Optimizer,
  execution: Execution,
  shardings: TrainState,
  *,
  accumulation: int = 1,
  rows_per_example: int = 1,
) -> TrainStep:
  """Returns the jitted `train_step(state, batch) -> (state, metrics)`.

  The state is donated: the one passed in is gone afterwards. Inputs and
  outputs have explicit shardings, so the second step is not compiled again.

  Metrics are float32 scalars: loss (mean over the global weight), weight_sum
  (for language models: trained tokens), grad_norm (before clipping),
  clip_factor, param_norm, learning_rate, nonfinite (1: the loss or the
  gradient is not finite; the state is spoilt), and every aux sum of the loss
  over the weight. For a model with experts also those of `experts.metrics`;
  what is minimised is loss + router_loss.

  With accumulation, gradients cross the mesh axes that replicate the weights
  (`data`) once a step: each replica adds up its own. Over `fsdp` they are
  scattered after every micro-batch, by the nature of it: no device has room
  for a whole gradient.

  Args:
    objective: what to minimise.
    optimizer: how.
    execution: how the model runs; its mesh and rules place everything.
    shardings: of the state, from `train.state.shardings_of`.
    accumulation: micro-batches a step.
    rows_per_example: neighbouring rows that the loss reads together.

  Raises:
    ValueError: (at the first step) the batch does not divide over the mesh
      and the micro-batches.
  """
  mesh, rules = execution.mesh, execution.rules
  places, tree = jax.tree.flatten(shardings)

  def train_step(leaves: list, batch: Batch):
    state = tree.unflatten(leaves)
    num_rows = len(batch["tokens"])
    check_batch_size(
      num_rows,
      mesh,
      rules,
      accumulation=accumulation,
      rows_per_example=rows_per_example,
    )
    batch = _prepared(batch, execution)
    if experts.has_experts(state.model):
      batch = experts.with_router_weights(batch, objective.weight(batch))
    sums = _gradient_sums(
      objective,
      state.model,
      batch,
      step_key(state),
      execution,
      shardings.model,
      accumulation,
    )
    # The one division. A batch of nothing but padding has gradient 0.
    weight = jnp.where(sums.weight > 0, sums.weight, 1.0)
    grads = jax.tree.map(lambda g: g / weight, sums.grads)
    model, opt_state, metrics = optimizer.update(
      grads, state.opt_state, state.model, state.step
    )
    aux = dict(sums.aux)
    if experts.ROUTER in aux:
      stats = aux.pop(experts.ROUTER)
      model = experts.rebalanced(model, stats)
      metrics |= experts.metrics(stats, weight, batch)
    loss = sums.loss / weight
    finite = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
    metrics |= {
      "loss": loss,
      "weight_sum": sums.weight,
      "param_norm": global_norm(model),
      "nonfinite": 1.0 - finite.astype(jnp.float32),
    }
    clash = metrics.keys() & aux.keys()
    assert not clash, f"the loss names its aux like a metric: {clash}"
    metrics |= {name: value / weight for name, value in aux.items()}
    state = TrainState(
      step=state.step + 1, model=model, opt_state=opt_state, rng=state.rng
    )
    return jax.tree.leaves(state), metrics

  jitted = jax.jit(
    train_step,
    donate_argnums=0,
    in_shardings=(places, batch_sharding(mesh, rules)),
    out_shardings=(places, replicated(mesh)),
  )
  return TrainStep(jitted, tree)


def make_eval_step(
  objective: Objective, execution: Execution, model_shardings: nnx.Module
) -> Callable[[nnx.Module, Batch], tuple[jax.Array, jax.Array, Metrics]]:
  """Returns the jitted `eval_step(model, batch)`, without dropout.

  It gives the sums of the loss as they are: add them up over batches, divide
  once.

  Args:
    objective: the training loss.
    execution: how the model runs.
    model_shardings: `shardings.model` of the training step.
  """
  mesh, rules = execution.mesh, execution.rules

  def eval_step(model: nnx.Module, batch: Batch):
    num_rows = len(batch["tokens"])
    check_batch_size(num_rows, mesh, rules)
    batch = _prepared(batch, execution)
    loss, weight, aux = objective(model, batch, None, execution)
    return loss, weight, {k: v for k, v in aux.items() if k != experts.ROUTER}

  return jax.jit(
    eval_step,
    in_shardings=(model_shardings, batch_sharding(mesh, rules)),
    out_shardings=replicated(mesh),
  )


def _prepared(batch: Batch, execution: Execution) -> Batch:
  """The batch with its rows numbered and its tokens in the order of the mesh.

  Where devices share a sequence and a causal mask would give the last of them
  most of the work, each takes a part from the start and one from the end.
  Nothing else depends on the order: a token is its row, segment and position.
  """
  B, T = batch["tokens"].shape
  axis = execution.context_axis
  if axis is not None and execution.context != "ulysses":
    num_devices = execution.mesh.shape[axis]
    if T % (2 * num_devices) == 0:
      order = permutation("zigzag", num_devices, T)
      batch = {
        name: x[:, order] if x.shape[:2] == (B, T) else x
        for name, x in batch.items()
      }
  return batch | {"row_ids": jnp.arange(B, dtype=jnp.int32)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Sums:
  """What a step adds up over micro-batches and devices, float32."""

  loss: jax.Array
  weight: jax.Array
  aux: Metrics
  grads: Any


def _gradient_sums(
  objective: Objective,
  model: nnx.Module,
  batch: Batch,
  key: jax.Array,
  execution: Execution,
  model_shardings: nnx.Module,
  accumulation: int,
) -> _Sums:
  """Returns the sums of a batch and the gradient of the loss sum."""
  rules = execution.rules

  def micro(batch: Batch, execution: Execution) -> _Sums:
    def loss(model):
      total, weight, aux = objective(model, batch, key, execution)
      minimised = total
      if experts.ROUTER in aux:
        stats = experts.batch_sums(aux[experts.ROUTER], batch)
        minimised += stats["loss"]
        aux = aux | {experts.ROUTER: stats}
      return minimised, (total, weight, aux)

    gradient = jax.value_and_grad(loss, has_aux=True)
    (_, (total, weight, aux)), grads = gradient(model)
    # Said, not left to XLA's propagation: each goes where its weight is.
    grads = jax.lax.with_sharding_constraint(grads, model_shardings)
    return _Sums(total, weight, aux, grads)

  if accumulation == 1:
    return micro(batch, execution)

  def accumulate(micro_batches: Batch, execution: Execution) -> _Sums:
    def add(total, batch):
      return jax.tree.map(jnp.add, total, micro(batch, execution)), None

    first = jax.tree.map(lambda x: x[0], micro_batches)
    shapes = jax.eval_shape(lambda batch: micro(batch, execution), first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    return jax.lax.scan(add, zeros, micro_batches)[0]

  # Were the scan one program over all replicas of the weights, XLA would
  # reduce every micro-batch. A vmap over the replicas gives each a gradient
  # of its own; the sum over them afterwards is the only reduction.
  replicas = _replica_axes(execution, model_shardings)
  shards = tuple(axis for axis in rules.batch if axis not in replicas)
  inner = dataclasses.replace(
    execution, rules=dataclasses.replace(rules, batch=shards)
  )
  batch = {
    name: _split_rows(x, execution, replicas, accumulation)
    for name, x in batch.items()
  }
  if not replicas:
    return accumulate(jax.tree.map(lambda x: x[0], batch), inner)
  sums = jax.vmap(
    lambda batch: accumulate(batch, inner), spmd_axis_name=replicas
  )(batch)
  return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)


def _replica_axes(
  execution: Execution, model_shardings: nnx.Module
) -> tuple[str, ...]:
  """Returns the mesh axes that split the batch but no weight."""
  used = set()
  for place in jax.tree.leaves(model_shardings):
    for entry in place.spec:
      used |= {entry} if isinstance(entry, str) else set(entry or ())
  return tuple(
    axis
    for axis in execution.rules.batch
    if execution.mesh.shape[axis] > 1 and axis not in used
  )


def _split_rows(
  x: jax.Array,
  execution: Execution,
  replicas: tuple[str, ...],
  accumulation: int,
) -> jax.Array:
  """Splits rows into [replicas, accumulation, rows of a micro-batch, ...].

  Every micro-batch takes its rows from every device, so none moves.
  """
  mesh, axes = execution.mesh, execution.rules.batch
  sizes = [mesh.shape[axis] for axis in axes]
  rows = len(x) // math.prod(sizes) // accumulation
  shards = [axis for axis in axes if axis not in replicas]
  order = [axes.index(axis) for axis in (*replicas, *shards)]
  # The micro-batch dim goes between the replicas and the other shards.
  order.insert(len(replicas), len(axes))
  order += range(len(axes) + 1, len(axes) + 1 + x.ndim)
  num_replicas = math.prod(mesh.shape[axis] for axis in replicas)
  rest = x.shape[1:]
  x = x.reshape(*sizes, accumulation, rows, *rest).transpose(order)
  x = x.reshape(num_replicas, accumulation, -1, *rest)
  spec = PartitionSpec(replicas or None, None, tuple(shards) or None)
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
