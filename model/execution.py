"""How to run a model, as opposed to what it is (`model/config.py`)."""

import dataclasses
import math
from typing import Literal

import jax
from jax.sharding import Mesh

from model.precision import POLICIES, Precision
from sharding.axes import Rules
from sharding.rules import constrain

Context = Literal["ring", "all_gather", "ulysses"]
Remat = Literal["none", "dots", "block", "nested"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
  """Everything that may change speed and memory but not the function.

  Attributes:
    precision: dtypes; see `model/precision.py`.
    attention: implementation of `flash_attention`.
    loss: implementation of `linear_cross_entropy`.
    context: how queries meet keys where devices share a sequence: "ring",
      "all_gather" (`pallas_kernels/ring_attention`) or "ulysses".
    experts: implementation of `grouped_matmul`.
    remat: what the backward pass recomputes. "none": nothing; "dots": all
      but what matmuls and attention put out; "block": all but the inputs of
      every `remat_every`-th block; "nested": a scan of scans, both recomputed,
      which keeps O(sqrt L) block inputs (arXiv:1604.06174).
    remat_every: blocks between two kept inputs, for "block".
    offload_activations: whether what "block" or "dots" keeps waits in host
      memory for the backward pass.
    unroll: layers per iteration of the compiled loop.
    loss_chunk: tokens per device whose logits exist at one time.
    mesh: the devices; None: leave placement to JAX.
    rules: how logical dims map to the axes of `mesh`.
  """

  precision: Precision = POLICIES["float32"]
  attention: str = "auto"
  loss: str = "auto"
  context: Context = "ring"
  experts: str = "auto"
  remat: Remat = "none"
  remat_every: int = 1
  offload_activations: bool = False
  unroll: int = 1
  loss_chunk: int = 1024
  mesh: Mesh | None = None
  rules: Rules = Rules()

  @property
  def platform(self) -> str:
    """Of the devices that will run this: a plan may be for another machine."""
    if self.mesh is None:
      return jax.default_backend()
    return self.mesh.devices.flat[0].platform

  @property
  def num_batch_shards(self) -> int:
    """How many ways the rows of a batch are split."""
    if self.mesh is None:
      return 1
    return math.prod(self.mesh.shape[axis] for axis in self.rules.batch)

  @property
  def context_axis(self) -> str | None:
    """The mesh axis whose devices share a sequence; None: each has it whole.

    Raises:
      ValueError: the rules split the sequence over several axes.
    """
    if self.mesh is None:
      return None
    axes = [axis for axis in self.rules.seq if self.mesh.shape[axis] > 1]
    if len(axes) > 1:
      raise ValueError(
        f"wanted one mesh axis in rules.seq, got {self.rules.seq}"
      )
    return axes[0] if axes else None

  def shard(self, x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """Constrains the dims of `x`, called by logical names, to the mesh.

    Raises:
      ValueError: a dim does not divide over its mesh axes.
    """
    if self.mesh is None:
      return x
    return constrain(x, names, self.mesh, self.rules)
