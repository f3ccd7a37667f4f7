"""The table of token embeddings, wherever its parts lie."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from model import weights
from model.config import ModelConfig
from model.execution import Execution
from sharding.regions import by_device
from sharding.rules import mesh_axes, sharding


class Embed(nnx.Module):
  """The table [V, D]."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    """Declares the table."""
    self.table = weights.weight(
      rngs,
      weights.normal(config.init_std),
      vocab=config.vocab_size,
      embed=config.embed_dim,
    )

  def __call__(
    self, tokens_BT: jax.Array, scale: float, execution: Execution
  ) -> jax.Array:
    """Rows of the table times `scale`, [B, T, D], as activations.

    On a mesh, tokens go to the table and not the table to tokens: each device
    looks up the tokens of all that share the table with it, in its part of the
    vocabulary and of D, and what it found goes back. A table made whole, and
    its gradient, would be read and sent as a whole for a few thousand rows.
    """
    mesh, dtype = execution.mesh, execution.precision.activations
    scaled = lambda x_BTD: (x_BTD * scale).astype(dtype)
    if mesh is None or mesh.size == 1:
      return scaled(self.table[...][tokens_BT])
    rules = execution.rules
    axes = lambda name: tuple(
      a for a in mesh_axes(name, rules) if mesh.shape[a] > 1
    )
    split = axes("batch") + axes("seq")
    # Rows of the batch are exchanged for parts of D. Axes that split the table
    # and not the batch leave it whole.
    shared = tuple(a for a in axes("embed") if a in axes("batch"))
    vocab = tuple(a for a in axes("vocab") if a not in split)
    scattered = bool(vocab) and set(vocab) <= set(axes("residual_seq"))
    rules = dataclasses.replace(rules, embed=shared, vocab=vocab)

    def local(table_VD, tokens_BT):
      if shared:
        tokens_BT = jax.lax.all_gather(tokens_BT, shared, tiled=True)
      x_BTD = scaled(_rows(table_VD, tokens_BT, vocab))
      if scattered:
        x_BTD = jax.lax.psum_scatter(
          x_BTD, vocab, scatter_dimension=1, tiled=True
        )
      elif vocab:
        x_BTD = jax.lax.psum(x_BTD, vocab)
      if shared:
        x_BTD = jax.lax.all_to_all(x_BTD, shared, 0, 2, tiled=True)
      return x_BTD

    place = lambda shape, names: (
      sharding("embedding", shape, names, mesh, rules).spec
    )
    B, T = tokens_BT.shape
    found = ("batch", "residual_seq" if scattered else "seq", None)
    look_up = by_device(
      local,
      mesh,
      in_specs=(
        place(self.table.shape, ("vocab", "embed")),
        place((B, T), ("batch", "seq")),
      ),
      out_specs=place((B, T, self.table.shape[1]), found),
    )
    return look_up(self.table[...], tokens_BT)


def _rows(table_VD, tokens_BT, axes: tuple[str, ...]) -> jax.Array:
  """Rows of the table; 0 for tokens of other parts of the vocabulary."""
  if not axes:
    return table_VD[tokens_BT]
  index_BT = tokens_BT - jax.lax.axis_index(axes) * len(table_VD)
  mine_BT = (index_BT >= 0) & (index_BT < len(table_VD))
  x_BTD = table_VD[jnp.where(mine_BT, index_BT, 0)]
  return jnp.where(mine_BT[..., None], x_BTD, 0.0)
