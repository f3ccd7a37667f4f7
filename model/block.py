"""One layer: attention and feed-forward around the residual stream."""

import jax
from flax import nnx

from model.attention import Attention, View
from model.config import ModelConfig
from model.dropout import dropout, fold
from model.execution import Execution
from model.mlp import MLP
from model.norms import Norm


class Block(nnx.Module):
  """The layer that a model repeats; `norm_placement` says where norms stand."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    """Declares the weights."""
    D = config.embed_dim
    self.config = config
    self.attention = Attention(config, rngs=rngs)
    self.mlp = MLP(config, rngs=rngs)
    self.attention_norm = Norm(config, rngs=rngs, embed=D)
    self.mlp_norm = Norm(config, rngs=rngs, embed=D)
    if config.norm_placement == "sandwich":
      self.attention_post_norm = Norm(config, rngs=rngs, embed=D)
      self.mlp_post_norm = Norm(config, rngs=rngs, embed=D)

  def __call__(
    self,
    x_BTD: jax.Array,
    view: View,
    *,
    kind: int | jax.Array,
    cache,
    dropout_keys_B: jax.Array | None,
    execution: Execution,
  ):
    """Maps the residual stream; see `Attention` for the arguments.

    Returns:
      The residual stream [B, T, D] and what `cache` gave.
    """
    rate = self.config.residual_dropout
    placement = self.config.norm_placement
    x = x_BTD

    def leave(y, branch):
      """A branch, placed and thinned as the residual stream wants it."""
      y = execution.shard(y, ("batch", "residual_seq", None))
      return dropout(y, rate, fold(dropout_keys_B, branch), view.numbers)

    def attend(x):
      x = execution.shard(x, ("batch", "seq", None))
      y, new = self.attention(
        x,
        view,
        kind=kind,
        cache=cache,
        dropout_keys_B=dropout_keys_B,
        execution=execution,
      )
      return leave(y, 1), new

    def feed(x):
      x = execution.shard(x, ("batch", "seq", None))
      y = self.mlp(x, execution)
      return leave(y, 2)

    with jax.named_scope("block"):
      if placement == "post":
        y, new = attend(x)
        x = self.attention_norm(x + y)
        return self.mlp_norm(x + feed(x)), new
      if placement == "parallel":
        y, new = attend(self.attention_norm(x))
        return x + y + feed(self.mlp_norm(x)), new
      if placement == "sandwich":
        y, new = attend(self.attention_norm(x))
        x = x + self.attention_post_norm(y)
        return x + self.mlp_post_norm(feed(self.mlp_norm(x))), new
      y, new = attend(self.attention_norm(x))
      x = x + y
      return x + feed(self.mlp_norm(x)), new
