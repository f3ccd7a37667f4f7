"""What a call of the op asks for, apart from its arrays."""

import dataclasses
from collections.abc import Callable

import jax

from pallas_kernels.linear_cross_entropy import split
from pallas_kernels.linear_cross_entropy.tuning import Blocks

# The logical dims of an activation -> the same, placed on a mesh.
Shard = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """The static part of a call; see `linear_cross_entropy` for the meaning."""

  layout: str
  scale: float
  soft_cap: float | None
  z_loss: float
  top_k: int
  operands: str
  chunk: int
  num_batch_shards: int
  shard: Shard | None
  vocab_axis: str | tuple[str, ...] | None
  blocks: Blocks | None

  @property
  def equation(self) -> str:
    """Of the projection."""
    return f"BTD,{self.layout}->BTV"

  @property
  def vocab_dim(self) -> int:
    """Of the head."""
    return self.layout.index("V")

  def place(self, x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """Pins the placement of `x`, if the caller has said how."""
    return x if self.shard is None else self.shard(x, names)

  def first_id(self, head: jax.Array) -> jax.Array | int:
    """The id of the first token that this device's head gives a logit."""
    return split.first_id(head.shape[self.vocab_dim], self.vocab_axis)
