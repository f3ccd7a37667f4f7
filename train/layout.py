"""Where a state holds the layers of its model, and how they get there.

On a mesh with a pipeline the stacked layers of a state stand in the order of
the stages (`sharding/stages.py`), empty places among them. What is not a step,
checkpoints above all, knows the order of the model alone. In an empty place
stands 0, which no update changes, so norms do not notice it.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from model import accounting
from model.config import ModelConfig
from sharding.rules import is_variable
from sharding.stages import Ends, Layout, split_layers, stage_costs

Tree = TypeVar("Tree")


def make_layout(
  config: ModelConfig,
  mesh: Mesh,
  *,
  seq_len: int,
  virtual_stages: int = 1,
) -> Layout | None:
  """Splits the layers over the stages of a mesh by what they cost.

  Args:
    config: the model.
    mesh: its axis `pipeline` gives the number of stages.
    seq_len: of the training data, for the cost of attention.
    virtual_stages: chunks of layers a stage.

  Returns:
    The layout; None on a mesh without a pipeline.

  Raises:
    ValueError: there are fewer layers than virtual stages, or virtual stages
      on a mesh without a pipeline.
  """
  P = mesh.shape["pipeline"]
  if P == 1 and virtual_stages > 1:
    raise ValueError(
      f"step.virtual_stages={virtual_stages} divides the stages of a pipeline:"
      " wanted mesh.pipeline > 1, or step.virtual_stages=1"
    )
  if P == 1:
    return None
  return _layout(config, P, seq_len, virtual_stages)


@functools.lru_cache(maxsize=64)
def _layout(
  config: ModelConfig, num_stages: int, seq_len: int, num_chunks: int
) -> Layout:
  costs, ends = _costs(config, seq_len, num_chunks)
  counts = split_layers(costs, num_stages * num_chunks, ends)
  return Layout(num_stages=num_stages, num_chunks=num_chunks, counts=counts)


def imbalance(layout: Layout, config: ModelConfig, seq_len: int) -> float:
  """Returns the largest over the mean cost of a (virtual) stage."""
  costs, ends = _costs(config, seq_len, layout.num_chunks)
  each = stage_costs(layout, costs, ends)
  return float(each.max() / each.mean())


def _costs(
  config: ModelConfig, seq_len: int, num_chunks: int
) -> tuple[list[float], Ends]:
  """FLOPs of a token in a tick: of each layer, and what the ends add.

  A layer runs forward, forward again, and backward, which is twice as much.
  The head's gradients are computed beside its loss: three times forward. With
  it goes the last stage's second forward pass, since nothing follows its
  first; with several chunks the stage has others to run in that time.
  """
  layers, head = accounting.layer_flops(config, seq_len)
  last_layer = 3 / 4 if num_chunks == 1 else 1.0
  return [4 * n for n in layers], Ends(last=3 * head, last_layer=last_layer)


def arrange(x: jax.Array, layout: Layout | None) -> jax.Array:
  """Puts the layers of an array [L, ...] into places, 0 where none is."""
  if layout is None or layout.is_natural:
    return x
  placed = x[np.maximum(layout.order, 0)]
  full = layout.order.reshape(-1, *(1,) * (x.ndim - 1)) >= 0
  return jnp.where(full, placed, jnp.zeros_like(placed))


def arranged(tree: Tree, layout: Layout | None) -> Tree:
  """Puts stacked layers [L, ...] into places [P V depth, ...].

  Args:
    tree: a model, or a tree with models in it (a state, moments).
    layout: where to; None: as it is.
  """
  if layout is None or layout.is_natural:
    return tree
  return _on_stacks(lambda x: arrange(x, layout), tree)


def natural(tree: Tree, layout: Layout | None) -> Tree:
  """Puts layers back into the order of the model; undoes `arranged`."""
  if layout is None or layout.is_natural:
    return tree
  return _on_stacks(lambda x: x[layout.places], tree)


def to_natural(tree: Tree, layout: Layout | None, shardings: Tree) -> Tree:
  """`natural` of arrays on their devices; what comes in stays valid.

  Args:
    tree: a state or a part of one.
    layout: in which it stands.
    shardings: of the result.
  """
  return _moved(natural, tree, layout, shardings)


def to_arranged(tree: Tree, layout: Layout | None, shardings: Tree) -> Tree:
  """`arranged` of arrays on their devices; see `to_natural`."""
  return _moved(arranged, tree, layout, shardings)


def _moved(function, tree: Tree, layout: Layout | None, shardings: Tree):
  if layout is None or layout.is_natural:
    return tree
  move = jax.jit(lambda tree: function(tree, layout), out_shardings=shardings)
  return move(tree)


def _on_stacks(function, tree: Any) -> Any:
  """Applies `function` to the arrays that stack all layers."""

  def apply(leaf):
    is_stack = is_variable(leaf) and leaf.ndim > len(leaf.get_metadata("names"))
    return leaf.replace(function(leaf[...])) if is_stack else leaf

  return jax.tree.map(apply, tree, is_leaf=is_variable)
