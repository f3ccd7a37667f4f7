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
from sharding import zero
from sharding.arrays import batch_sharding, check_batch_size
from sharding.axes import Rules
from sharding.compression import Residual
from sharding.rules import is_variable, replicated, tree_shardings
from train import exchange, experts
from train.objective import Batch, Metrics, Objective
from train.optimizers import Optimizer, global_norm
from train.state import TrainState, step_key

# Folded into a step's key; rows of a batch have lower numbers.
_ROUNDING = 2**31 - 1


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
  zero_stage: int = 3,
  compression: str = "none",
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

  With accumulation, gradients cross the mesh axes that replicate them (`data`;
  in ZeRO stage 1 `fsdp`) once a step: each replica adds up its own. From stage
  2 on they are scattered over `fsdp` after every layer of every micro-batch,
  by the nature of it: no device has room for a whole gradient.

  Args:
    objective: what to minimise.
    optimizer: how.
    execution: how the model runs; its mesh and rules place everything.
    shardings: of the state, from `train.state.shardings_of`.
    accumulation: micro-batches a step.
    rows_per_example: neighbouring rows that the loss reads together.
    zero_stage: what is split over `fsdp`, see `sharding/zero.py`.
    compression: of gradients between replicas, see `train/exchange.py`.

  Raises:
    ValueError: (at the first step) the batch does not divide over the mesh
      and the micro-batches.
  """
  mesh, rules = execution.mesh, execution.rules
  # The model must not gather weights that are whole.
  held = zero.parameter_rules(rules, zero_stage)
  execution = dataclasses.replace(execution, rules=held)
  places, tree = jax.tree.flatten(shardings)
  if (compression == "signs") != (optimizer.freeze_step is not None):
    raise ValueError(
      "step.compression=signs and optimizer.kind=onebit_adam belong together:"
      " signs of gradients would spoil the variance of another optimizer"
    )

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
    # Where a device updates a part of a weight, whatever it holds of it.
    parts = tree_shardings(state.model, mesh, rules)
    sums, residual = _gradient_sums(
      objective,
      state.model,
      batch,
      step_key(state),
      execution,
      zero.gradient_rules(rules, zero_stage),
      accumulation,
      _exchange(compression, optimizer, state),
    )
    # The one division. A batch of nothing but padding has gradient 0.
    weight = jnp.where(sums.weight > 0, sums.weight, 1.0)
    # Said, not left to XLA's propagation: each goes to who updates its weight.
    grads = jax.lax.with_sharding_constraint(sums.grads, parts)
    grads = jax.tree.map(lambda g: g / weight, grads)
    model = jax.lax.with_sharding_constraint(state.model, parts)
    model, opt_state, metrics = optimizer.update(
      grads, state.opt_state, model, state.step
    )
    model = jax.lax.with_sharding_constraint(model, parts)
    aux = dict(sums.aux)
    if experts.ROUTER in aux:
      stats = aux.pop(experts.ROUTER)
      model = experts.rebalanced(model, stats)
      if optimizer.master_weights:
        weights = experts.rebalanced(opt_state.weights, stats)
        opt_state = opt_state._replace(weights=weights)
      metrics |= experts.metrics(stats, weight, batch)
    param_norm = global_norm(model)
    if zero_stage < 3:
      whole = zero.gather(
        jax.tree.leaves(state.model),
        jax.tree.leaves(model),
        _stacked(model),
        jax.tree.leaves(shardings.model),
      )
      model = jax.tree.structure(model).unflatten(whole)
    loss = sums.loss / weight
    finite = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
    metrics |= {
      "loss": loss,
      "weight_sum": sums.weight,
      "param_norm": param_norm,
      "nonfinite": 1.0 - finite.astype(jnp.float32),
    }
    clash = metrics.keys() & aux.keys()
    assert not clash, f"the loss names its aux like a metric: {clash}"
    metrics |= {name: value / weight for name, value in aux.items()}
    state = TrainState(
      step=state.step + 1,
      model=model,
      opt_state=opt_state,
      rng=state.rng,
      residual=residual,
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
  gradient_rules: Rules,
  accumulation: int,
  compressed: exchange.Exchange | None,
) -> tuple[_Sums, Residual | None]:
  """Returns the sums of a batch and the gradient of the loss sum.

  And what compression owes to the gradients of later steps.
  """
  mesh, rules = execution.mesh, execution.rules

  def vjp(batch: Batch, execution: Execution):
    def loss(model):
      total, weight, aux = objective(model, batch, key, execution)
      minimised = total
      if experts.ROUTER in aux:
        stats = experts.batch_sums(aux[experts.ROUTER], batch)
        minimised += stats["loss"]
        aux = aux | {experts.ROUTER: stats}
      return minimised, (total, weight, aux)

    return jax.vjp(loss, model, has_aux=True)

  if accumulation == 1 and compressed is None:
    minimised, pull_back, sums = vjp(batch, execution)
    return _Sums(*sums, *pull_back(jnp.ones_like(minimised))), None

  # Were all replicas of the gradient one program, XLA would reduce every
  # micro-batch. A vmap over the replicas gives each a gradient of its own; the
  # sum over them afterwards is the only reduction.
  places = tree_shardings(model, mesh, gradient_rules)
  replicas = exchange.replica_axes(jax.tree.leaves(places), mesh, rules)
  shards = tuple(axis for axis in rules.batch if axis not in replicas)
  inner = dataclasses.replace(
    execution, rules=dataclasses.replace(rules, batch=shards)
  )
  batch = {
    name: _split_rows(x, execution, replicas, accumulation)
    for name, x in batch.items()
  }
  # Replicas stand behind the dim of the layers, over which a scan runs: it
  # reads no reference by another dim than the first.
  stacked = _stacked(model)
  dims = list(map(int, stacked))
  grads = [
    jax.new_ref(_zeros(weight, place, dim, replicas))
    for weight, place, dim in zip(
      jax.tree.leaves(model), jax.tree.leaves(places), dims, strict=True
    )
  ]
  tree = jax.tree.structure(model)

  def micro(batch: Batch, grads: list):
    minimised, pull_back, sums = vjp(batch, inner)
    # In place, each layer's gradient as it is made: a micro-batch never has a
    # whole one beside the sum.
    pull_back.with_refs(tree.unflatten(grads))(jnp.ones_like(minimised))
    return sums

  if replicas:
    micro = jax.vmap(micro, in_axes=(0, dims), spmd_axis_name=replicas)
  else:
    batch = jax.tree.map(lambda x: x[:, 0], batch)
  step = lambda carry, batch: (carry, micro(batch, grads))
  each = jax.lax.scan(step, None, batch)[1]
  over = (0, 1) if replicas else 0
  sums = jax.tree.map(lambda x: jnp.sum(x, axis=over), each)
  totals = list(map(jax.freeze, grads))
  parts = jax.tree.leaves(tree_shardings(model, mesh, rules))
  if replicas[-1:] == ("fsdp",):
    totals = zero.sum_parts(totals, stacked, parts, replicas)
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
      parts,
      replicas,
      key=jax.random.fold_in(key, _ROUNDING),
    )
    totals = [total * weight for total in totals]
  return _Sums(*sums, tree.unflatten(totals)), residual


def _exchange(
  compression: str, optimizer: Optimizer, state: TrainState
) -> exchange.Exchange | None:
  """How the step after `state` adds up gradients; None: as they are."""
  if compression == "none":
    return None
  how = exchange.Exchange(compression=compression, residual=state.residual)
  if optimizer.freeze_step is None:
    return how
  return dataclasses.replace(
    how,
    momentum=jax.tree.leaves(optimizer.momentum(state.opt_state)),
    decay=optimizer.b1,
    whole=state.step < optimizer.freeze_step,
  )


def _stacked(model: nnx.Module) -> list[bool]:
  """Which leaves of a model have layers in front."""
  return [
    weight.ndim > len(weight.get_metadata("names"))
    for weight in jax.tree.leaves(model, is_leaf=is_variable)
  ]


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


def _split_rows(
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
