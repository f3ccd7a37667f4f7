"""Between our stacked arrays and one tensor a layer, one tensor at a time.

Checkpoints store a matrix as [outputs, inputs], with heads folded in; ours is
[inputs, outputs] with heads apart, and layers, then experts, stacked in front.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Protocol

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from model.config import ModelConfig
from model.transformer import Transformer
from sharding.axes import Rules
from sharding.rules import tree_shardings

_FLOATS = tuple(
  np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
)
_MAX_LISTED = 8  # names in one message
_STACKED = ("{layer}", "{expert}")  # in names: dims in front, in this order


class Source(Protocol):
  """Tensors by name, read when asked for."""

  def names(self) -> Set[str]:
    """All that there are."""

  def shape(self, name: str) -> tuple[int, ...]:
    """Of a tensor, without reading it."""

  def read(self, name: str) -> np.ndarray:
    """A tensor, of a floating dtype."""


def load(
  config: ModelConfig,
  names: Mapping[str, str],
  source: Source,
  *,
  ignored: Set[str] = frozenset(),
  mesh: Mesh | None = None,
  rules: Rules = Rules(),
) -> Transformer:
  """A model filled from a checkpoint, array by array.

  Each tensor is read once; at most one of our arrays (of the devices of this
  process) is held on the host at a time.

  Args:
    config: what the model is.
    names: our path -> name in the checkpoint, of a family; "{layer}" and
      "{expert}" stand for the numbers of what we stack.
    source: the checkpoint.
    ignored: tensors that need not be used.
    mesh: where to place the arrays; None: the default device.
    rules: how logical dims map to the axes of `mesh`.

  Raises:
    ValueError: a tensor is missing, unexpected, of another shape, or not of a
      floating dtype. All of them are named before anything is read.
  """
  abstract = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  leaves, tree = _flatten(abstract)
  _check(names, leaves, source, ignored)
  if mesh is None:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = [device] * len(leaves)
  else:
    placed, _ = _flatten(tree_shardings(abstract, mesh, rules))
    shardings = [leaf.get_value() for leaf in placed.values()]

  filled = []
  for (path, leaf), sharding in zip(leaves.items(), shardings, strict=True):
    array = _fill(path, leaf, names[path], source, sharding)
    filled.append(leaf.replace(array))
  return jax.tree.unflatten(tree, filled)


def tensors(
  model: Transformer, names: Mapping[str, str], dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
  """The tensors of a checkpoint, in the order of our arrays.

  Args:
    model: of which the weights are taken.
    names: our path -> name in the checkpoint.
    dtype: to store: "float32", "bfloat16" or "float16".

  Yields:
    Name and contiguous array.
  """
  leaves, _ = _flatten(model)
  _check_map(names, leaves)
  for path, leaf in leaves.items():
    ours = np.asarray(leaf.get_value())
    for index, name in _each(names[path], leaf.shape):
      theirs = one = ours[index]
      if path.endswith(".w"):
        theirs = one.reshape(_matrix(leaf, one.shape)).T
      elif path.endswith(".b"):
        theirs = one.reshape(-1)
      # Writers take the raw buffer: a transposed view would be stored wrong.
      yield name, np.ascontiguousarray(theirs, dtype=dtype)


def _is_variable(x) -> bool:
  return isinstance(x, nnx.Variable)


def _flatten(model) -> tuple[dict[str, nnx.Variable], jax.tree_util.PyTreeDef]:
  """Variables by path, as in "layers.attention.q.w"."""
  leaves, tree = jax.tree.flatten_with_path(model, is_leaf=_is_variable)
  named = {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf
    for path, leaf in leaves
  }
  return named, tree


def _num_stacked(name: str) -> int:
  """How many dims in front of our array one tensor of theirs lacks."""
  return sum(field in name for field in _STACKED)


def _each(name: str, shape) -> Iterator[tuple[tuple[int, ...], str]]:
  """Each tensor of an array of ours: where it stands in it, and its name."""
  fields = [field for field in _STACKED if field in name]
  for index in np.ndindex(*shape[: len(fields)]):
    numbers = {f[1:-1]: i for f, i in zip(fields, index, strict=True)}
    yield index, name.format(**numbers)


def _matrix(leaf: nnx.Variable, shape: tuple[int, ...]) -> tuple[int, int]:
  """[inputs, outputs] of a projection of `shape` (of one layer and expert).

  What leads back into the residual stream has one output dim, "embed"; all
  others have one input dim.
  """
  split = len(shape) - 1 if leaf.get_metadata("names")[-1] == "embed" else 1
  return int(np.prod(shape[:split])), int(np.prod(shape[split:]))


def _stored_shape(path: str, leaf: nnx.Variable, name: str) -> tuple[int, ...]:
  """The shape of a leaf's tensors in a checkpoint."""
  shape = leaf.shape[_num_stacked(name) :]
  if path.endswith(".w"):
    return _matrix(leaf, shape)[::-1]
  return (int(np.prod(shape)),) if path.endswith(".b") else tuple(shape)


def _check_map(names: Mapping[str, str], leaves: Mapping) -> None:
  unnamed = [path for path in leaves if path not in names]
  if unnamed:
    raise ValueError(f"this family has no name for {', '.join(unnamed)}")


def _check(names, leaves, source: Source, ignored: Set[str]) -> None:
  """Raises ValueError unless the checkpoint is exactly of this model."""
  _check_map(names, leaves)
  wanted = {}
  for path, leaf in leaves.items():
    shape = _stored_shape(path, leaf, names[path])
    wanted |= {name: shape for _, name in _each(names[path], leaf.shape)}
  have = source.names()
  shapes = {n: source.shape(n) for n in wanted if n in have}
  problems = {
    "missing": sorted(set(wanted) - have),
    "unexpected": sorted(have - set(wanted) - set(ignored)),
    "of another shape": [
      f"{n} {shape}, wanted {wanted[n]}"
      for n, shape in shapes.items()
      if tuple(shape) != wanted[n]
    ],
  }
  listed = [
    f"{len(found)} {kind}: {', '.join(found[:_MAX_LISTED])}"
    + (", ..." if len(found) > _MAX_LISTED else "")
    for kind, found in problems.items()
    if found
  ]
  if listed:
    raise ValueError(
      f"the checkpoint is not of this model; tensors {'; '.join(listed)}"
    )


def _fill(path, leaf, name, source: Source, sharding) -> jax.Array:
  """One of our arrays: every distinct shard is copied out of each tensor."""
  shape, stacked = leaf.shape, _num_stacked(name)
  pieces = {}
  for index in sharding.addressable_devices_indices_map(shape).values():
    bounds = _bounds(index, shape)
    size = [stop - start for start, stop in bounds]
    pieces.setdefault(bounds, np.empty(size, np.float32))
  for index, tensor in _each(name, shape):
    wanted = [
      bounds
      for bounds in pieces
      if all(a <= i < b for i, (a, b) in zip(index, bounds))
    ]
    if not wanted:
      continue
    one = _read(source, tensor)
    one = (one.T if path.endswith(".w") else one).reshape(shape[stacked:])
    for bounds in wanted:
      at = tuple(i - start for i, (start, _) in zip(index, bounds))
      window = tuple(slice(*b) for b in bounds[stacked:])
      pieces[bounds][at] = one[window]

  piece = lambda index: pieces[_bounds(index, shape)]
  return jax.make_array_from_callback(shape, sharding, piece)


def _read(source: Source, name: str) -> np.ndarray:
  value = source.read(name)
  if value.dtype not in _FLOATS:
    raise ValueError(
      f"tensor {name} is {value.dtype}: a quantised checkpoint of a kind that"
      " is not supported; use its float or GGUF form"
    )
  return value


def _bounds(index, shape) -> tuple[tuple[int, int], ...]:
  """The (start, stop) of each slice: slices themselves cannot be keys."""
  return tuple(s.indices(size)[:2] for s, size in zip(index, shape))
