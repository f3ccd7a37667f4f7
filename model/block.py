"""One layer: attention and feed-forward around the residual stream."""

import jax
from flax import nnx

from model.attention import Attention, View
from model.config import ModelConfig
from model.dropout import dropout, fold
from model.execution import Execution
from model.mlp import MLP
from model.moe import MoE
from model.norms import Norm


class Block(nnx.Module):
  """The layer that a model repeats; `norm_placement` says where norms stand."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    """Declares the weights."""
    D = config.embed_dim
    self.config = config
    self.attention = Attention(config, rngs=rngs)
    if config.moe is None:
      self.mlp = MLP(config, rngs=rngs)
    else:
      self.moe = MoE(config, rngs=rngs)
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
      The residual stream [B, T, D], what `cache` gave, and the statistics of
      `MoE` ({} without experts).
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
      if self.config.moe is None:
        y, stats = self.mlp(x, execution), {}
      else:
        y, stats = self.moe(x, view, execution)
      return leave(y, 2), stats

    with jax.named_scope("block"):
      if placement == "post":
        y, new = attend(x)
        x = self.attention_norm(x + y)
        y, stats = feed(x)
        return self.mlp_norm(x + y), new, stats
      if placement == "parallel":
        y, new = attend(self.attention_norm(x))
        fed, stats = feed(self.mlp_norm(x))
        return x + y + fed, new, stats
      if placement == "sandwich":
        y, new = attend(self.attention_norm(x))
        x = x + self.attention_post_norm(y)
        y, stats = feed(self.mlp_norm(x))
        return x + self.mlp_post_norm(y), new, stats
      y, new = attend(self.attention_norm(x))
      x = x + y
      y, stats = feed(self.mlp_norm(x))
      return x + y, new, stats
