"""What a stage of a pipeline does in a tick, for `sharding/pipeline.py`.

Each action is one branch of several, chosen by what the stage is in it: idle,
the first virtual stage, one in the middle, or the last.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.schedules import BACKWARD, Schedule
from sharding.split_backward import split

Tree = Any
Aux = dict[str, Tree]
# What a tick says: column of `sharding.buffers.Plan.rows`, or "stage" -> int32.
Row = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """What the virtual stages compute; loss (a scalar) and aux are float32 sums.

  Attributes:
    first: (ends, micro-batch) -> x, what the first layer reads.
    layers: (chunk, x, micro-batch, virtual stage) -> (x, loss, aux): a
      chunk's layers, and what they add to the loss.
    last: (ends, x, micro-batch) -> (loss, aux): what follows the last layer.
  """

  first: Callable[[Tree, Tree], jax.Array]
  layers: Callable[
    [Tree, jax.Array, Tree, jax.Array], tuple[jax.Array, jax.Array, Aux]
  ]
  last: Callable[[Tree, jax.Array, Tree], tuple[jax.Array, Aux]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
  """What a step adds up over micro-batches and stages.

  Attributes:
    loss: float32 scalar.
    aux: more such sums.
    chunks: gradients of the layers; None from an evaluation.
    ends: gradients of what is before the first and after the last layer.
  """

  loss: jax.Array
  aux: Aux
  chunks: Tree = None
  ends: Tree = None

  def add(self, loss: jax.Array, aux: Aux) -> "Sums":
    """Adds what one action counted."""
    plus = lambda x, more: x if more is None else jax.tree.map(jnp.add, x, more)
    aux = {name: plus(x, aux.get(name)) for name, x in self.aux.items()}
    return dataclasses.replace(self, loss=self.loss + loss, aux=aux)

  def add_chunk(self, index: jax.Array, gradient: Tree) -> "Sums":
    """Adds gradients of one chunk of layers."""
    num_chunks = len(jax.tree.leaves(self.chunks)[0])
    if num_chunks == 1:
      add = lambda total, g: total + g[None]
    else:
      add = lambda total, g: total.at[index].add(g)
    return dataclasses.replace(
      self, chunks=jax.tree.map(add, self.chunks, gradient)
    )

  def add_ends(self, gradient: Tree) -> "Sums":
    """Adds gradients of the ends."""
    return dataclasses.replace(
      self, ends=jax.tree.map(jnp.add, self.ends, gradient)
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
  """What a stage carries from tick to tick.

  Attributes:
    buffers: name -> tree of arrays [slots, ...], see `sharding.buffers`.
    sums: what the stage has added up.
  """

  buffers: dict[str, Tree]
  sums: Sums

  def read(self, name: str, slot: jax.Array) -> Tree:
    """What stands in a slot."""
    return jax.tree.map(lambda x: take(x, slot), self.buffers[name])

  def store(self, name: str, slot: jax.Array, value: Tree) -> "State":
    """Writes a slot in place; slot -1 writes nothing."""
    at = jnp.maximum(slot, 0)

    def write(buffer, x):
      if not len(buffer):
        return buffer
      x = jnp.where(slot >= 0, x, take(buffer, at))
      return lax.dynamic_update_index_in_dim(buffer, x, at, 0)

    written = jax.tree.map(write, self.buffers[name], value)
    return State(self.buffers | {name: written}, self.sums)

  def with_sums(self, sums: Sums) -> "State":
    """The same with other sums."""
    return State(self.buffers, sums)


def take(array: jax.Array, index: jax.Array) -> jax.Array:
  """An element of the first dim."""
  if len(array) == 1:
    return array[0]
  return lax.dynamic_index_in_dim(array, index, keepdims=False)


# Branches of an action: what a stage is in it.
_IDLE, _FIRST, _MIDDLE, _LAST = range(4)


class Recomputed:
  """Actions of stages that keep their input and compute all else again.

  Without backward actions, what `sharding.schedules.evaluation` does.
  """

  def __init__(
    self, schedule: Schedule, parts: Parts, chunks, ends, micro_batches
  ):
    """Keeps what every action reads; see `sharding.pipeline.run`."""
    self.schedule, self.parts = schedule, parts
    self.chunks, self.ends = chunks, ends
    self.micro_batches = micro_batches
    self.one = jax.tree.map(lambda x: x[0], micro_batches)
    x = jax.eval_shape(parts.first, ends, self.one)
    self.nothing = jnp.zeros(x.shape, x.dtype)

  def start(self, sizes: dict[str, int]) -> State:
    """The state before the first tick."""
    buffers = {
      name: _slots(sizes[name], self.nothing)
      for name in ("inputs", "gradients")
    }
    chunk, v = self._chunk(0), jnp.zeros((), jnp.int32)
    layers = jax.eval_shape(self.parts.layers, chunk, self.nothing, self.one, v)
    last = jax.eval_shape(self.parts.last, self.ends, self.nothing, self.one)
    aux = _zeros({**layers[2], **last[1]})
    sums = Sums(jnp.zeros((), jnp.float32), aux)
    if BACKWARD in self.schedule.actions:
      chunks, ends = _zeros(self.chunks), _zeros(self.ends)
      sums = dataclasses.replace(sums, chunks=chunks, ends=ends)
    return State(buffers, sums)

  def forward(self, state: State, row: Row) -> tuple[jax.Array, State]:
    """Returns what goes to the next stage."""
    micro, v = self._micro(row, "forward"), self._virtual(row, "forward")
    chunk = lambda: self._chunk(row["forward_chunk"])
    evaluates = BACKWARD not in self.schedule.actions

    def layers(x):
      x, loss, aux = self.parts.layers(chunk(), x, micro(), v)
      # What a backward action computes again it also counts.
      return x, state.sums.add(loss, aux) if evaluates else state.sums

    received = lambda: state.read("inputs", row["forward_inputs"])
    first = lambda: layers(self.parts.first(self.ends, micro()))

    def last():
      if not evaluates:
        return self.nothing, state.sums
      x, sums = layers(received())
      return self.nothing, sums.add(*self.parts.last(self.ends, x, micro()))

    idle = lambda: (self.nothing, state.sums)
    y, sums = self._branch(
      row["forward"], v, idle, first, lambda: layers(received()), last
    )
    return y, state.with_sums(sums)

  def backward(self, state: State, row: Row) -> tuple[jax.Array, State]:
    """Returns what goes to the stage before."""
    parts, sums, c = self.parts, state.sums, row["backward_chunk"]
    micro, v = self._micro(row, "backward"), self._virtual(row, "backward")
    received = lambda: state.read("inputs", row["backward_inputs"])
    returned = lambda: state.read("gradients", row["backward_gradients"])
    one = jnp.ones((), jnp.float32)

    def first():
      def values(chunk, ends):
        x = parts.first(ends, micro())
        x, loss, aux = parts.layers(chunk, x, micro(), v)
        return (x, loss), aux

      (_, loss), vjp, aux = jax.vjp(
        values, self._chunk(c), self.ends, has_aux=True
      )
      d_chunk, d_ends = vjp((returned(), one))
      added = sums.add(loss, aux).add_chunk(c, d_chunk).add_ends(d_ends)
      return self.nothing, added

    def middle():
      def values(chunk, x):
        x, loss, aux = parts.layers(chunk, x, micro(), v)
        return (x, loss), aux

      (_, loss), vjp, aux = jax.vjp(
        values, self._chunk(c), received(), has_aux=True
      )
      d_chunk, dx = vjp((returned(), one))
      return dx, sums.add(loss, aux).add_chunk(c, d_chunk)

    def last():
      def values(chunk, ends, x):
        x, loss, aux = parts.layers(chunk, x, micro(), v)
        of_last, aux_of_last = parts.last(ends, x, micro())
        return loss + of_last, (aux, aux_of_last)

      loss, vjp, (aux, aux_of_last) = jax.vjp(
        values, self._chunk(c), self.ends, received(), has_aux=True
      )
      d_chunk, d_ends, dx = vjp(one)
      added = sums.add(loss, aux).add(jnp.zeros_like(loss), aux_of_last)
      return dx, added.add_chunk(c, d_chunk).add_ends(d_ends)

    idle = lambda: (self.nothing, sums)
    dx, sums = self._branch(row["backward"], v, idle, first, middle, last)
    return dx, state.with_sums(sums)

  def weight(self, state: State, row: Row) -> State:
    """Nothing: the backward action has these gradients too."""
    del row
    return state

  def _micro(self, row: Row, action: str) -> Callable[[], Tree]:
    """The micro-batch of an action, to be read within its branch."""
    m = row[action]
    return lambda: jax.tree.map(lambda x: take(x, m), self.micro_batches)

  def _virtual(self, row: Row, action: str) -> jax.Array:
    """The virtual stage of an action."""
    return row[f"{action}_chunk"] * self.schedule.num_stages + row["stage"]

  def _chunk(self, index) -> Tree:
    """The weights of a chunk of layers."""
    return jax.tree.map(lambda w: take(w, index), self.chunks)

  def _branch(self, m, v, idle, first, middle, last):
    """Takes the branch of what this stage is; all have equal results."""
    end = self.schedule.num_virtual - 1
    kind = jnp.where(v == 0, _FIRST, jnp.where(v == end, _LAST, _MIDDLE))
    kind = jnp.where(m < 0, _IDLE, kind)
    if end == 1:  # There is nothing between the ends, nor to compile for it.
      middle = idle
    return lax.switch(kind, [idle, first, middle, last])


class Stashed(Recomputed):
  """Actions of stages that keep what gradients need, for split schedules.

  Gradients of the ends do not wait: they are part of the backward action.
  """

  def __init__(self, schedule, parts, chunks, ends, micro_batches):
    """Also cuts the layers' gradients apart."""
    super().__init__(schedule, parts, chunks, ends, micro_batches)
    rest = self.one, jnp.zeros((), jnp.int32)
    self.split = split(parts.layers, self._chunk(0), self.nothing, rest)
    self.rest = rest

  def start(self, sizes: dict[str, int]) -> State:
    """The state before the first tick, with room for what is kept."""
    state = super().start(sizes)
    chunk = self._chunk(0)
    (y, _, _), saved = jax.eval_shape(
      self.split.forward, chunk, self.nothing, self.rest
    )
    _, kept = jax.eval_shape(
      self.split.backward, chunk, self.rest, saved, self.nothing
    )
    more = {
      # The output itself is what the last stage begins its way back with.
      "residuals": _slots(sizes["residuals"], (saved, y)),
      "cotangents": _slots(sizes["cotangents"], kept),
    }
    return State(state.buffers | more, state.sums)

  def forward(self, state: State, row: Row) -> tuple[jax.Array, State]:
    """Returns what goes to the next stage."""
    micro, v = self._micro(row, "forward"), self._virtual(row, "forward")

    def layers(x):
      rest = micro(), v
      (y, loss, aux), saved = self.split.forward(self._chunk(0), x, rest)
      after = state.store("residuals", row["forward_residuals"], (saved, y))
      return y, after.with_sums(state.sums.add(loss, aux))

    middle = lambda: layers(state.read("inputs", row["forward_inputs"]))
    return self._branch(
      row["forward"],
      v,
      lambda: (self.nothing, state),
      lambda: layers(self.parts.first(self.ends, micro())),
      middle,
      middle,
    )

  def backward(self, state: State, row: Row) -> tuple[jax.Array, State]:
    """Returns what goes to the stage before."""
    micro, v = self._micro(row, "backward"), self._virtual(row, "backward")

    def layers(dy, sums):
      saved, _ = state.read("residuals", row["backward_residuals"])
      dx, kept = self.split.backward(self._chunk(0), (micro(), v), saved, dy)
      slot = row["backward_cotangents"]
      return dx, state.store("cotangents", slot, kept).with_sums(sums)

    def middle():
      dy = state.read("gradients", row["backward_gradients"])
      return layers(dy, state.sums)

    def first():
      dx, after = middle()
      _, vjp = jax.vjp(lambda ends: self.parts.first(ends, micro()), self.ends)
      (d_ends,) = vjp(dx)
      return self.nothing, after.with_sums(after.sums.add_ends(d_ends))

    def last():
      _, y = state.read("residuals", row["backward_residuals"])
      values = lambda ends, y: self.parts.last(ends, y, micro())
      (loss, aux), (d_ends, dy) = jax.value_and_grad(
        values, (0, 1), has_aux=True
      )(self.ends, y)
      return layers(dy, state.sums.add(loss, aux).add_ends(d_ends))

    idle = lambda: (self.nothing, state)
    return self._branch(row["backward"], v, idle, first, middle, last)

  def weight(self, state: State, row: Row) -> State:
    """Adds the gradients of a chunk's weights."""
    micro, v = self._micro(row, "weight"), self._virtual(row, "weight")

    def layers():
      saved, _ = state.read("residuals", row["weight_residuals"])
      kept = state.read("cotangents", row["weight_cotangents"])
      gradient = self.split.weight(self._chunk(0), (micro(), v), saved, kept)
      return state.sums.add_chunk(row["weight_chunk"], gradient)

    sums = lax.cond(row["weight"] >= 0, layers, lambda: state.sums)
    return state.with_sums(sums)


def _zeros(tree: Tree) -> Tree:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _slots(count: int, like: Tree) -> Tree:
  """Empty buffers for so many values."""
  return jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), like)
