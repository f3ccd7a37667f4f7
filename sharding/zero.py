"""ZeRO: which arrays of a training state are split over `fsdp`.

Stage 1 splits the optimizer state, stage 2 gradients as well, stage 3
parameters as well (arXiv:1910.02054). The rules of a run say how a weight is
split when it is; a stage takes `fsdp` out of them for what stays whole. With
float32 parameters, gradients and two moments, N devices hold 8 + 8/N, 4 + 12/N
and 16/N bytes a parameter; with bfloat16 parameters and gradients and float32
master weights 4 + 12/N, 2 + 14/N and 16/N.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sharding.axes import Rules
from sharding.rules import without_axes


def parameter_rules(rules: Rules, stage: int) -> Rules:
  """Returns the rules of the weights: whole over `fsdp` before stage 3."""
  return rules if stage >= 3 else _weights_whole(rules)


def gradient_rules(rules: Rules, stage: int) -> Rules:
  """Returns the rules of what micro-batches add up to.

  Before stage 2 each device of `fsdp` adds up a whole gradient of its own
  rows; they meet once a step. The optimizer takes its part of the sum, which
  `rules` itself places, under every stage.
  """
  return rules if stage >= 2 else _weights_whole(rules)


def sum_parts(
  totals: Sequence[jax.Array],
  stacked: Sequence[bool],
  places: Sequence[NamedSharding],
  replicas: tuple[str, ...],
) -> list[jax.Array]:
  """Adds up whole gradients over `fsdp`, each device its part: stage 1.

  Layer by layer, since of some stacks a TPU's compiler reduces the whole.

  Args:
    totals: [L, n, ...] where stacked, else [n, ...]: the gradients of n
      replicas.
    stacked: which have layers in front.
    places: of the sums, [L, ...] or [...], split over `fsdp`.
    replicas: the mesh axes of n; `fsdp` is the last.

  Returns:
    The same of the replicas along the other axes, if there are any; else
    [L, ...] or [...].
  """
  others = replicas[:-1]

  def add(total, place):
    part = lambda total: jax.lax.with_sharding_constraint(
      jnp.sum(total, axis=0), place
    )
    if not others:
      return part(total)
    total = total.reshape(-1, place.mesh.shape["fsdp"], *total.shape[1:])
    return jax.vmap(part, spmd_axis_name=others)(total)

  def add_layer(carry, layers):
    inner = [_of_layer(place) for place in _choose(places, stacked)]
    return carry, list(map(add, layers, inner))

  rest = [not many for many in stacked]
  singles = map(add, _choose(totals, rest), _choose(places, rest))
  _, layers = jax.lax.scan(add_layer, None, _choose(totals, stacked))
  return _merge(layers, singles, stacked)


def gather(
  olds: Sequence[jax.Array],
  parts: Sequence[jax.Array],
  stacked: Sequence[bool],
  places: Sequence[NamedSharding],
) -> list[jax.Array]:
  """Makes updated weights whole again over `fsdp`: stages 1 and 2.

  Layer by layer into the old arrays: a collective cannot write into a donated
  one, and a step would hold all weights twice.

  Args:
    olds: the weights before the update, [L, ...] where stacked.
    parts: those after it, split over `fsdp`.
    stacked: which have layers in front.
    places: of the old ones.
  """
  whole = jax.lax.with_sharding_constraint
  layers, inner = _choose(parts, stacked), _choose(places, stacked)

  # The layout that a gather wants is that of a layer's slice; without a barrier
  # XLA (jaxlib 0.12, CPU) computes the whole update in it, beside the old one.
  apart = jax.lax.optimization_barrier

  def write(index, stacks):
    news = [
      whole(apart(stack[index]), _of_layer(place))
      for stack, place in zip(layers, inner, strict=True)
    ]
    return [
      jax.lax.dynamic_update_index_in_dim(stack, new, index, 0)
      for stack, new in zip(stacks, news, strict=True)
    ]

  rest = [not many for many in stacked]
  singles = map(whole, _choose(parts, rest), _choose(places, rest))
  stacks = _choose(olds, stacked)
  num_layers = len(stacks[0]) if stacks else 0
  stacks = jax.lax.fori_loop(0, num_layers, write, stacks)
  return _merge(stacks, singles, stacked)


def _choose(items: Iterable, chosen: Sequence[bool]) -> list:
  return list(itertools.compress(items, chosen))


def _merge(layers: Iterable, singles: Iterable, stacked: Sequence[bool]):
  """The inverse of two choices."""
  layers, singles = iter(layers), iter(singles)
  return [next(layers if many else singles) for many in stacked]


def _of_layer(place: NamedSharding) -> NamedSharding:
  """Where one layer of a stack lives."""
  return NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))


def _weights_whole(rules: Rules) -> Rules:
  """The same for activations; no dim of a weight is split over `fsdp`."""
  return dataclasses.replace(
    without_axes(rules, ("fsdp",)),
    batch=rules.batch,
    seq=rules.seq,
    residual_seq=rules.residual_seq,
  )
