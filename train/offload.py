"""Gradients and updates of a state that stands in host memory.

Arrays of stacked layers come to the device a layer at a time, and go back;
what is not a layer's (embeddings, the last norm, the head) stays.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from sharding import offload
from sharding.rules import is_variable, stacked
from train.config import OffloadConfig
from train.optimizers import Optimizer, global_norm


def check_experts(
  model: nnx.Module, config: OffloadConfig, optimizer: Optimizer
) -> None:
  """Refuses weights in host memory that a step moves by hand.

  Raises:
    ValueError: the biases of routers are moved, and would stand there.
  """
  rate = model.config.moe.bias_rate
  mastered = config.optimizer and optimizer.master_weights
  if rate and (config.parameters or mastered):
    raise ValueError(
      f"model.moe.bias_rate={rate} moves the biases of routers, which step."
      "offload would keep in host memory; set model.moe.bias_rate=none, or"
      " step.offload.parameters=false and, with master weights, step.offload."
      "optimizer=false"
    )


def placed(shardings: Any, abstract: Any) -> Any:
  """Returns the shardings with those of stacked layers in host memory.

  Args:
    shardings: a tree of them.
    abstract: the same tree of shapes.
  """
  leaves, tree = jax.tree.flatten(shardings)
  return tree.unflatten(
    [
      offload.on_host(place) if many else place
      for place, many in zip(leaves, stacked(abstract), strict=True)
    ]
  )


def on_host(tree: Any) -> Any:
  """Says, inside of a jitted function, that layers' arrays are on the host."""
  leaves, structure = jax.tree.flatten(tree)
  return structure.unflatten(
    [
      offload.to_host(leaf) if many else leaf
      for leaf, many in zip(leaves, stacked(tree), strict=True)
    ]
  )


def streamed(model: nnx.Module, totals: Sequence | None = None) -> nnx.Module:
  """Returns the model with its layers' weights to be streamed.

  Args:
    model: the weights.
    totals: what the gradient of each leaf is added to, None for what is not a
      layer's; None: evaluation.
  """
  many = stacked(model)
  leaves, tree = jax.tree.flatten(model)
  return tree.unflatten(
    [
      offload.Streamed(leaf, total) if layer else leaf
      for leaf, total, layer in zip(
        leaves, totals or [None] * len(many), many, strict=True
      )
    ]
  )


def gradient_sums(
  loss: Callable, model: nnx.Module, micro_batches: Any, places: nnx.Module
) -> tuple[Any, nnx.Module]:
  """Adds up gradients in host memory, each layer's when it is made.

  Over axes that replicate gradients they are reduced after every layer of
  every micro-batch.

  Args:
    loss: (model, batch) -> (what is minimised, sums).
    model: the weights.
    micro_batches: tree of arrays [accumulation, ...].
    places: of the gradients.

  Returns:
    The sums, and the gradients, of layers in host memory.
  """
  many = stacked(model)
  weights, tree = jax.tree.flatten(model)
  layers, singles = _split(weights, many)

  def wrapped(parts, batch):
    totals, singles = parts
    whole = tree.unflatten(_merged(layers, singles))
    return loss(streamed(whole, totals), batch)

  def add(carry, batch):
    totals, grads = carry
    (_, sums), (totals, new) = jax.value_and_grad(wrapped, has_aux=True)(
      (totals, singles), batch
    )
    return (totals, jax.tree.map(jnp.add, grads, new)), sums

  zeros = [
    (offload.zeros if layer else _zeros)(weight.shape, weight.dtype, place)
    for weight, place, layer in zip(
      weights, jax.tree.leaves(places), many, strict=True
    )
  ]
  carry, sums = jax.lax.scan(add, _split(zeros, many), micro_batches)
  sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
  return sums, tree.unflatten(_merged(*carry))


def update(
  optimizer: Optimizer,
  config: OffloadConfig,
  grads: nnx.Module,
  weight: jax.Array,
  opt_state: Any,
  model: nnx.Module,
  step: jax.Array,
) -> tuple[nnx.Module, Any, dict[str, jax.Array]]:
  """`Optimizer.update` with `grads` over `weight`, a layer at a time.

  Args:
    optimizer: the rule.
    config: what stands in host memory, and who computes.
    grads: sums.
    weight: what to divide them by.
    opt_state: from `Optimizer.start` or the last update.
    model: the weights.
    step: int32 scalar.

  Returns:
    What `Optimizer.update` returns, and "param_norm".
  """
  trees = {"grads": grads, "opt_state": opt_state, "model": model}
  structures = {name: jax.tree.structure(tree) for name, tree in trees.items()}
  many = {name: stacked(tree) for name, tree in trees.items()}
  layers, singles = {}, {}
  for name, tree in trees.items():
    layers[name], singles[name] = _split(jax.tree.leaves(tree), many[name])
  # Counts, which every part of an update reads.
  scalars = [
    None if is_variable(leaf) else leaf
    for leaf in jax.tree.leaves(opt_state, is_leaf=is_variable)
  ]

  def squares(leaves) -> jax.Array:
    return jnp.square(global_norm(leaves))

  divided = lambda leaves: [
    None if g is None else g.astype(jnp.float32) / weight for g in leaves
  ]
  norm_of = lambda _, leaves: (
    None,
    squares(divided(offload.to_device(leaves))),
  )
  of_layers = jax.lax.scan(norm_of, None, layers["grads"])[1]
  norm = jnp.sqrt(jnp.sum(of_layers) + squares(divided(singles["grads"])))
  factor, metrics = optimizer.clipping(norm, step)

  def move(parts, scalars, weight, factor, step):
    """Updates the leaves that are there; the others are None."""
    parts = parts | {"opt_state": _merged(parts["opt_state"], scalars)}
    whole = {
      name: structures[name].unflatten(part) for name, part in parts.items()
    }
    grads = jax.tree.map(
      lambda g: g.astype(jnp.float32) / weight * factor, whole["grads"]
    )
    new_model, new_state = optimizer.move(
      grads, whole["opt_state"], whole["model"], step
    )
    return {
      "model": structures["model"].flatten_up_to(new_model),
      "opt_state": structures["opt_state"].flatten_up_to(new_state),
    }

  stacks = {name: layers[name] for name in ("model", "opt_state")}

  def move_layer(stacks, scanned):
    """Updates one layer in the stacks themselves: new ones would be more."""
    index, grads = scanned
    parts = jax.tree.map(lambda stack: stack[index], stacks)
    parts["grads"] = grads
    if config.host_update:
      arguments = offload.to_host((parts, scalars, weight, factor, step))
      new = offload.computed_on_host(move)(*arguments)
    else:
      arguments = offload.to_device(parts), scalars, weight, factor, step
      new = move(*arguments)
    new = {name: _split(part, many[name])[0] for name, part in new.items()}
    norm = squares(offload.to_device(new["model"]))
    homes = {"model": config.parameters, "opt_state": config.optimizer}
    for name, host in homes.items():
      go = offload.to_host if host else offload.to_device
      new[name] = go(new[name])
    write = lambda stack, layer: jax.lax.dynamic_update_index_in_dim(
      stack, layer, index, 0
    )
    return jax.tree.map(write, stacks, new), norm

  num_layers = len(jax.tree.leaves(layers["grads"])[0])
  new_layers, norms = jax.lax.scan(
    move_layer, stacks, (jnp.arange(num_layers), layers["grads"])
  )
  new_singles = move(singles, scalars, weight, factor, step)
  param_norm = jnp.sum(norms) + squares(
    _split(new_singles["model"], many["model"])[1]
  )
  model, opt_state = (
    structures[name].unflatten(_merged(new_layers[name], new_singles[name]))
    for name in ("model", "opt_state")
  )
  return model, opt_state, metrics | {"param_norm": jnp.sqrt(param_norm)}


def _zeros(shape: tuple[int, ...], dtype: Any, place: NamedSharding):
  """On the devices."""
  return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), place)


def _split(leaves: Iterable, many: Sequence[bool]) -> tuple[list, list]:
  """The layers' leaves and the others, with None in place of what is not."""
  pairs = list(zip(leaves, many, strict=True))
  return (
    [leaf if layer else None for leaf, layer in pairs],
    [None if layer else leaf for leaf, layer in pairs],
  )


def _merged(first: Iterable, second: Iterable) -> list:
  """What is in either of two lists."""
  return [b if a is None else a for a, b in zip(first, second, strict=True)]
