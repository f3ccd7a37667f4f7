"""One training step: gradients of micro-batches, one division, one update.

A loss returns sums (see `Objective`). They are added up over micro-batches and
devices, and divided by the global weight here and nowhere else, so a step does
not depend on how the batch was split or packed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from model.execution import Execution
from pallas_kernels.ring_attention.order import permutation
from sharding import zero
from sharding.arrays import batch_sharding, check_batch_size
from sharding.rules import replicated, stacked, tree_shardings
from sharding.stages import Layout
from train import exchange, experts, local_sgd
from train import offload as host
from train.config import LocalSGDConfig, OffloadConfig
from train.gradients import Sums, gradient_sums, replica_sums, split_rows
from train.objective import Batch, Metrics, Objective
from train.optimizers import Optimizer, global_norm
from train.pipeline import make_stages, most_micro_batches
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
  zero_stage: int = 3,
  compression: str = "none",
  whole_steps: int = 0,
  layout: Layout | None = None,
  schedule: str = "1f1b",
  offload: OffloadConfig = OffloadConfig(),
  local: LocalSGDConfig = LocalSGDConfig(),
  num_steps: int | None = None,
) -> TrainStep:
  """Returns the jitted `train_step(state, batch) -> (state, metrics)`.

  The state is donated: the one passed in is gone afterwards. Inputs and
  outputs have explicit shardings, so the second step is not compiled again.

  Metrics are float32 scalars: loss (mean over the global weight), weight_sum
  (for language models: trained tokens), grad_norm (before clipping),
  clip_factor, param_norm, learning_rate, nonfinite (1: the loss or the
  gradient is not finite; the state is spoilt), and every aux sum of the loss
  over the weight. For a model with experts also those of `experts.metrics`;
  what is minimised is loss + router_loss. Where replicas train apart, norms are
  means over replicas, and drift is the mean distance that they have from the
  outer weights, before they meet.

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
    whole_steps: first ones whose gradients are not compressed.
    layout: of the state's layers, on a mesh with a pipeline.
    schedule: of a pipeline, which takes a micro-batch after the other.
    offload: what stands in host memory.
    local: whether replicas train apart, see `train/local_sgd.py`.
    num_steps: of the run, whose last step lets such replicas meet; None: it
      has no end.

  Raises:
    ValueError: a pipeline without a layout, or a schedule that does not fit;
      (at the first step) the batch does not divide over the mesh
      and the micro-batches.
  """
  mesh, rules = execution.mesh, execution.rules
  # The model must not gather weights that are whole.
  held = zero.parameter_rules(rules, zero_stage)
  execution = dataclasses.replace(execution, rules=held)
  places, tree = jax.tree.flatten(shardings)
  check_together(
    optimizer, mesh, compression=compression, offload=offload, local=local
  )
  stages = make_stages(schedule, layout, mesh, accumulation)

  def updated(
    sums: Sums,
    model: nnx.Module,
    opt_state: Any,
    step: jax.Array,
    parts: nnx.Module,
  ) -> tuple[nnx.Module, Any, Metrics]:
    """The new weights and optimizer state, and what the update reports."""
    # Said, not left to XLA's propagation.
    old, grads, weight = model, sums.grads, _divisor(sums)
    if not offload.gradients:
      grads = jax.lax.with_sharding_constraint(grads, parts)
    if not offload.parameters:
      model = jax.lax.with_sharding_constraint(model, parts)
    if offload.of_state:
      model, opt_state, metrics = host.update(
        optimizer, offload, grads, weight, opt_state, model, step
      )
    else:
      grads = jax.tree.map(lambda g: g / weight, grads)
      model, opt_state, metrics = optimizer.update(
        grads, opt_state, model, step
      )
    if experts.ROUTER in sums.aux:
      stats = sums.aux[experts.ROUTER]
      model = experts.rebalanced(model, stats, layout)
      if optimizer.master_weights:
        weights = experts.rebalanced(opt_state.weights, stats, layout)
        opt_state = opt_state._replace(weights=weights)
    if not offload.of_state:
      metrics["param_norm"] = global_norm(model)
    if zero_stage < 3 and stages is None:
      whole = zero.gather(
        jax.tree.leaves(old),
        jax.tree.leaves(jax.lax.with_sharding_constraint(model, parts)),
        stacked(model),
        jax.tree.leaves(shardings.model),
      )
      model = jax.tree.structure(model).unflatten(whole)
    return model, opt_state, metrics

  def together(
    state: TrainState, batch: Batch, parts: nnx.Module
  ) -> tuple[TrainState, Sums, Metrics]:
    """A step of one model, of the gradient of the whole batch."""
    if experts.has_experts(state.model):
      batch = experts.with_router_weights(batch, objective.weight(batch))
    model, opt_state = state.model, state.opt_state
    # Where arrays stand is not in their types until it is said.
    if offload.parameters:
      model = host.on_host(model)
    if offload.optimizer:
      opt_state = host.on_host(opt_state)
    sums, residual = gradient_sums(
      objective,
      model,
      batch,
      step_key(state),
      execution,
      zero.gradient_rules(rules, zero_stage),
      parts,
      accumulation,
      stages,
      _exchange(compression, whole_steps, optimizer, state),
      offload,
    )
    model, opt_state, metrics = updated(
      sums, model, opt_state, state.step, parts
    )
    state = dataclasses.replace(
      state, model=model, opt_state=opt_state, residual=residual
    )
    return state, sums, metrics

  def apart(
    state: TrainState, batch: Batch, parts: nnx.Module
  ) -> tuple[TrainState, Sums, Metrics]:
    """A step of replicas, each by the gradient of its own rows."""
    axes = local_sgd.replica_axes(state.model, mesh, rules)

    def each(sums: Sums, model: nnx.Module, opt_state: Any):
      model, opt_state, metrics = updated(
        sums, model, opt_state, state.step, parts
      )
      away = jax.tree.map(jnp.subtract, model, state.model)
      metrics["drift"] = global_norm(away)
      return local_sgd.Replicas(model, opt_state), metrics

    def inner(replicas: local_sgd.Replicas):
      sums = replica_sums(
        objective,
        replicas.model,
        batch,
        step_key(state),
        execution,
        parts,
        accumulation,
        axes,
      )
      replicas, metrics = jax.vmap(each, spmd_axis_name=axes)(sums, *replicas)
      return replicas, (dataclasses.replace(sums, grads=None), metrics)

    outer, replicas, (sums, metrics) = local_sgd.step_with(
      inner,
      local_sgd.Outer(state.model, state.opt_state),
      state.replicas,
      state.step,
      config=local,
      parts=parts,
      num_steps=num_steps,
    )
    state = dataclasses.replace(
      state, model=outer.model, opt_state=outer.opt_state, replicas=replicas
    )
    # Outside of a step beside which weights cross, and not to be moved into it:
    # they would cross with these scalars, which wait for its end.
    sums, metrics = jax.lax.optimization_barrier((sums, metrics))
    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
    return state, sums, jax.tree.map(jnp.mean, metrics)

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
      host.check_experts(state.model, offload, optimizer)
    # Where a device updates a part of a weight, whatever it holds of it.
    parts = tree_shardings(state.model, mesh, rules)
    take = together if local.steps is None else apart
    state, sums, metrics = take(state, batch, parts)
    weight, aux = _divisor(sums), dict(sums.aux)
    if experts.ROUTER in aux:
      metrics |= experts.metrics(aux.pop(experts.ROUTER), weight, batch)
    loss = sums.loss / weight
    finite = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"])
    metrics |= {
      "loss": loss,
      "weight_sum": sums.weight,
      "nonfinite": 1.0 - finite.astype(jnp.float32),
    }
    clash = metrics.keys() & aux.keys()
    assert not clash, f"the loss names its aux like a metric: {clash}"
    metrics |= {name: value / weight for name, value in aux.items()}
    state = dataclasses.replace(state, step=state.step + 1)
    return jax.tree.leaves(state), metrics

  jitted = jax.jit(
    train_step,
    donate_argnums=0,
    in_shardings=(places, batch_sharding(mesh, rules)),
    out_shardings=(places, replicated(mesh)),
  )
  return TrainStep(jitted, tree)


def check_together(
  optimizer: Optimizer,
  mesh: Mesh,
  *,
  compression: str,
  offload: OffloadConfig,
  local: LocalSGDConfig,
) -> None:
  """Refuses settings of a step that do not go with each other or the mesh.

  Raises:
    ValueError: some do not.
  """
  local_sgd.check(
    local,
    mesh=mesh,
    master_weights=optimizer.master_weights,
    onebit=optimizer.freeze_step is not None,
  )
  if (compression == "signs") != (optimizer.freeze_step is not None):
    raise ValueError(
      "step.compression=signs and optimizer.kind=onebit_adam belong together:"
      " signs of gradients would spoil the variance of another optimizer"
    )
  if mesh.shape["pipeline"] == 1:
    return
  if compression != "none":
    raise ValueError(
      f"step.compression={compression!r} is not for pipelines, whose stages add"
      " up float32 gradients: set step.compression=none or mesh.pipeline=1"
    )
  if offload != OffloadConfig():
    raise ValueError(
      "step.offload is not for pipelines, whose stages keep their layers on the"
      f" device: got {offload}. Leave it as it is, or set mesh.pipeline=1"
    )


def make_eval_step(
  objective: Objective,
  execution: Execution,
  model_shardings: nnx.Module,
  *,
  rows_per_example: int = 1,
  layout: Layout | None = None,
) -> Callable[[nnx.Module, Batch], tuple[jax.Array, jax.Array, Metrics]]:
  """Returns the jitted `eval_step(model, batch)`, without dropout.

  It gives the sums of the loss as they are: add them up over batches, divide
  once.

  Args:
    objective: the training loss.
    execution: how the model runs.
    model_shardings: `shardings.model` of the training step.
    rows_per_example: neighbouring rows that the loss reads together.
    layout: of the model's layers, on a mesh with a pipeline.
  """
  mesh, rules = execution.mesh, execution.rules
  places = jax.tree.leaves(model_shardings)
  streams = any(place.memory_kind == "pinned_host" for place in places)

  def eval_step(model: nnx.Module, batch: Batch):
    if streams:
      model = host.streamed(host.on_host(model))
    num_rows = len(batch["tokens"])
    check_batch_size(num_rows, mesh, rules)
    batch = _prepared(batch, execution)
    if layout is None:
      loss, weight, aux = objective(model, batch, None, execution)
    else:
      shards = execution.num_batch_shards * rows_per_example
      num_micro = most_micro_batches(num_rows // shards, layout)
      micro_batches = {
        name: split_rows(x, execution, (), num_micro)
        for name, x in batch.items()
      }
      stages = make_stages("evaluation", layout, mesh, num_micro)
      loss, aux, _ = stages.sums(
        objective, model, micro_batches, None, execution
      )
      weight = objective.weight(batch)
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


def _divisor(sums: Sums) -> jax.Array:
  """What sums are divided by: a batch of nothing but padding has gradient 0."""
  return jnp.where(sums.weight > 0, sums.weight, 1.0)


def _exchange(
  compression: str, whole_steps: int, optimizer: Optimizer, state: TrainState
) -> exchange.Exchange | None:
  """How the step after `state` adds up gradients; None: as they are."""
  if compression == "none":
    return None
  how = exchange.Exchange(compression=compression, residual=state.residual)
  if optimizer.freeze_step is None:
    whole = state.step < whole_steps if whole_steps else None
    return dataclasses.replace(how, whole=whole)
  momentum, root = optimizer.momentum(state.opt_state)
  return dataclasses.replace(
    how,
    momentum=jax.tree.leaves(momentum),
    root=jax.tree.leaves(root),
    decay=optimizer.b1,
    bound=optimizer.largest_direction,
    whole=state.step < optimizer.freeze_step,
  )
