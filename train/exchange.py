"""The sum of gradients over replicas, in fewer bytes.

Replicas of the weights stand on different slices (mesh axis `data`), with slow
links between them. Once a step they add up their gradients; here by
`sharding/compression.py`, each device the part of the gradient that it holds.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding import collectives
from sharding import compression as wire
from sharding.axes import Rules
from sharding.compression import Format, Int8, Largest, Residual, Signs
from sharding.rules import tree_shardings

FORMATS: dict[str, Format] = {
  "int8": Int8(),
  "largest": Largest(keep=128),
  "signs": Signs(),
}
# Rounding is right in expectation; what else is lost must be kept.
_WITH_FEEDBACK = ("largest", "signs")


def replica_axes(
  places: Sequence[NamedSharding], mesh: Mesh, rules: Rules
) -> tuple[str, ...]:
  """Returns the mesh axes that split the batch but no array, fsdp last.

  Args:
    places: of the arrays, such as gradients.
    mesh: of the run.
    rules: `rules.batch` names the axes that split the batch.
  """
  used = set()
  for place in places:
    for entry in place.spec:
      used |= {entry} if isinstance(entry, str) else set(entry or ())
  axes = [
    axis for axis in rules.batch if mesh.shape[axis] > 1 and axis not in used
  ]
  return tuple(sorted(axes, key=lambda axis: axis == "fsdp"))


def no_residual(
  model: nnx.Module, mesh: Mesh, rules: Rules, compression: str
) -> Residual | None:
  """Returns what is owed before the first step, for every device a row.

  Args:
    model: the weights, abstract or real.
    mesh: of the run.
    rules: logical dim -> mesh axes.
    compression: see `train.config.StepConfig`.

  Raises:
    ValueError: nothing is replicated, so there is nothing to compress.
  """
  if compression == "none":
    return None
  form = FORMATS[compression]
  places = jax.tree.leaves(tree_shardings(model, mesh, rules))
  replicas = replica_axes(places, mesh, rules)
  if not replicas:
    raise ValueError(
      f"step.compression={compression!r} is for gradients that replicas of the"
      " weights add up, but no mesh axis of rules.batch replicates them: set"
      " mesh.data above 1, or step.compression=none"
    )
  if compression not in _WITH_FEEDBACK:
    return None
  size = sum(
    _padded(math.prod(place.shard_shape(weight.shape)), form)
    for weight, place in zip(jax.tree.leaves(model), places, strict=True)
  )
  num_replicas = math.prod(mesh.shape[axis] for axis in replicas)
  one = jax.eval_shape(lambda: wire.no_residual(size, num_replicas, form))
  return jax.tree.map(lambda r: jnp.zeros((mesh.size, *r.shape)), one)


def residual_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the placement of a residual: each device has its own."""
  return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
  """How replicas add up the gradients of one step.

  With `momentum`, what crosses the wire is the next momentum, which every
  replica makes of the last one and of its own gradient (1-bit Adam,
  arXiv:2102.02888, algorithm 1). What comes back is the gradient that the
  optimizer makes the same momentum of.

  Signs of a block share a size. Of momenta, which differ by orders of magnitude
  between rows of an embedding, that would be noise that the small variances of
  rare rows blow up. So momenta cross as the update will have them, divided by
  the root of the variance; and since that stands still while gradients may
  grow, no further than Adam can go.

  Attributes:
    compression: "int8", "largest" or "signs".
    residual: of the last step; see `no_residual`.
    momentum: of each weight, alike on all replicas; None: gradients cross.
    root: of the variance, like `momentum`: what the update divides it by.
    decay: of the momentum, b1.
    bound: of the quotient.
    whole: bool scalar, whether this step's gradients cross as float32; None:
      they do not.
  """

  compression: str
  residual: Residual | None
  momentum: Sequence[jax.Array] | None = None
  root: Sequence[jax.Array] | None = None
  decay: float = 0.0
  bound: float = math.inf
  whole: jax.Array | None = None

  def sum(
    self,
    gradients: Sequence[jax.Array],
    dims: Sequence[int],
    places: Sequence[NamedSharding],
    replicas: tuple[str, ...],
    *,
    key: jax.Array,
  ) -> tuple[list[jax.Array], Residual | None]:
    """Returns the sums of the replicas' gradients, and the next residual.

    Args:
      gradients: of each weight those of all replicas, stacked along a dim; of
        the mean loss, as what is owed goes from step to step.
      dims: that dim of each.
      places: of the sums.
      replicas: mesh axes that split these dims.
      key: of rounding.
    """
    mesh = places[0].mesh
    specs = []
    for gradient, dim, place in zip(gradients, dims, places, strict=True):
      spec = list(place.spec) + [None] * (gradient.ndim - 1 - len(place.spec))
      spec.insert(dim, replicas)
      specs.append(PartitionSpec(*spec))
    sums = [place.spec for place in places]
    owed, all_alike = residual_sharding(mesh).spec, PartitionSpec()

    def on_device(gradients, momentum, root, residual, whole, key):
      shapes = [list(gradient.shape) for gradient in gradients]
      for shape, dim in zip(shapes, dims, strict=True):
        del shape[dim]
      x = self._flat(gradients)
      shift, unit = jnp.zeros(()), jnp.ones(())
      if momentum is not None:
        shift = self.decay / (1 - self.decay) * self._flat(momentum)
        unit = self._flat(root) / (1 - self.decay)
        unit = jnp.where(unit > 0, unit, 1.0)  # Where nothing fills blocks.
      reduce = functools.partial(
        wire.all_reduce,
        axis=replicas,
        form=FORMATS[self.compression],
        # By replica only: devices that hold the same part of an array must get
        # the same sum.
        key=jax.random.fold_in(key, jax.lax.axis_index(replicas)),
      )

      def compressed(residual):
        num = jax.lax.axis_size(replicas)
        part = (x + shift / num) / unit
        part = jnp.clip(part, -self.bound / num, self.bound / num)
        total, residual = reduce(part, residual=residual)
        return total * unit - shift, residual

      residual = jax.tree.map(lambda r: r[0], residual)
      if whole is None:
        total, residual = compressed(residual)
      else:
        total, residual = jax.lax.cond(
          whole,
          lambda residual: (collectives.all_reduce(x, replicas), residual),
          compressed,
          residual,
        )
      return (
        self._apart(total, shapes),
        jax.tree.map(lambda r: r[None], residual),
      )

    return jax.shard_map(
      on_device,
      mesh=mesh,
      in_specs=(
        specs,
        None if self.momentum is None else sums,
        None if self.root is None else sums,
        owed,
        all_alike,
        all_alike,
      ),
      out_specs=(sums, owed),
      check_vma=False,
    )(gradients, self.momentum, self.root, self.residual, self.whole, key)

  def _flat(self, arrays: Sequence[jax.Array]) -> jax.Array:
    """One float32 vector, in which each array has blocks of its own."""
    form = FORMATS[self.compression]
    flat = [
      jnp.pad(array.ravel(), (0, _padded(array.size, form) - array.size))
      for array in arrays
    ]
    return jnp.concatenate(flat).astype(jnp.float32)

  def _apart(self, x: jax.Array, shapes: Sequence[list[int]]) -> list:
    """The inverse of `_flat`."""
    arrays, start = [], 0
    for shape in shapes:
      size = math.prod(shape)
      arrays.append(x[start : start + size].reshape(shape))
      start += _padded(size, FORMATS[self.compression])
    return arrays


def _padded(size: int, form: Format) -> int:
  """The size of whole blocks."""
  return -(-size // form.block) * form.block
