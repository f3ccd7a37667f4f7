"""Tokens to the experts that they chose, on whatever device, and back.

This is what one device does inside `jax.shard_map`. It has N tokens, each with
k choices among E experts: M = N k rows, which it sorts by expert. Experts are
split over the X devices of mesh axes `axes`; where X > 1, rows travel to the
device of their expert, are sorted again, and come back the same way.

Nothing that moves a row is a scatter: both directions of every move are known,
and the gradient of a gather is the gather the other way.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Wire(NamedTuple):
  """How rows travel.

  Attributes:
    axes: mesh axes that split the experts.
    bound: the most rows that a device can send to another. Buffers of what
      arrives hold as many from every device, X `bound`.
    ragged: rows that there are travel (`jax.lax.ragged_all_to_all`, which a
      CPU does not have), not buffers of `bound`.
  """

  axes: tuple[str, ...]
  bound: int
  ragged: bool


def apply_experts(
  apply: Callable[[jax.Array, jax.Array], jax.Array],
  x_ND: jax.Array,
  choices_Nk: jax.Array,
  *,
  num_experts: int,
  wire: Wire | None = None,
) -> jax.Array:
  """What the chosen experts make of each token.

  Args:
    apply: (rows [R, D] sorted by expert, int32 sizes of the groups of this
      device's experts) -> [R, D], each row by its expert; 0 past the last
      group, whatever stands there.
    x_ND: this device's tokens.
    choices_Nk: int32, an expert, or E: to none.
    num_experts: E.
    wire: between the devices that share the experts; None: this one has all.

  Returns:
    [N, k, D]; 0 for choices of no expert.
  """
  N, k = choices_Nk.shape
  M, E = N * k, num_experts
  choices_M = choices_Nk.reshape(M)
  order_M = jnp.argsort(choices_M, stable=True)
  # Where each choice went.
  place_M = jnp.argsort(order_M)
  rows_MD = _spread(k, x_ND, order_M, place_M)
  ends_E = jnp.searchsorted(
    choices_M[order_M], jnp.arange(E), side="right", method="compare_all"
  ).astype(jnp.int32)
  counts_E = jnp.diff(ends_E, prepend=0)
  if wire is None:
    out_MD = apply(rows_MD, counts_E)
  else:
    X, me = jax.lax.axis_size(wire.axes), jax.lax.axis_index(wire.axes)
    R = X * wire.bound
    # Rows of each device for each expert of each device.
    counts_XXe = jax.lax.all_gather(counts_E, wire.axes).reshape(X, X, E // X)
    there, back = _routes(counts_XXe.sum(axis=2), me)
    arrived_RD = _exchange(wire, R, there, back, rows_MD)
    here_Xe = counts_XXe[:, me]
    source_R, target_R = _by_expert(here_Xe, R)
    sorted_RD = _permute(arrived_RD, source_R, target_R)
    out_RD = apply(sorted_RD, here_Xe.sum(axis=0))
    out_RD = _permute(out_RD, target_R, source_R)
    out_MD = _exchange(wire, M, back, there, out_RD)
  return _permute(out_MD, place_M, order_M).reshape(N, k, -1)


class _Route(NamedTuple):
  """One direction of an exchange, for this device; int32 [X], a peer each.

  Attributes:
    starts: first row that goes to the peer.
    sizes: rows that go to it.
    targets: where they begin there.
    arrivals: first row that comes from the peer.
    arriving: rows that come from it.
  """

  starts: jax.Array
  sizes: jax.Array
  targets: jax.Array
  arrivals: jax.Array
  arriving: jax.Array


def _routes(rows_XX: jax.Array, me: jax.Array) -> tuple[_Route, _Route]:
  """The way there and the way back.

  Args:
    rows_XX: int32, rows that each device (first dim) sends to each.
    me: this device.
  """
  # At the sender rows lie by receiver, at the receiver by sender.
  starts_XX = jnp.cumsum(rows_XX, axis=1) - rows_XX
  arrivals_XX = jnp.cumsum(rows_XX, axis=0) - rows_XX
  sent = starts_XX[me], rows_XX[me], arrivals_XX[me]
  came = arrivals_XX[:, me], rows_XX[:, me], starts_XX[:, me]
  return _Route(*sent, *came[:2]), _Route(*came, *sent[:2])


def _by_expert(sizes_Xe: jax.Array, length: int):
  """Between rows as they arrive, by sender, and rows by expert.

  Both lists hold the same blocks of rows, one for a sender and an expert, in
  another order.

  Args:
    sizes_Xe: int32, rows of each block.
    length: R, of either list.

  Returns:
    int32 [R], where a row by expert arrived, and where one that arrived
    stands by expert; R where there is none.
  """
  X, e = sizes_Xe.shape
  begin = lambda sizes: jnp.cumsum(sizes) - sizes
  by_sender = sizes_Xe.reshape(-1)
  arrived = begin(by_sender)
  by_expert = sizes_Xe.T.reshape(-1)
  sorted_ = begin(by_expert)
  turned = lambda starts, *shape: starts.reshape(shape).T.reshape(-1)
  arrived_at, sorted_at = turned(arrived, X, e), turned(sorted_, e, X)
  source = _moved(sorted_, by_expert, arrived_at, length, nowhere=length)
  target = _moved(arrived, by_sender, sorted_at, length, nowhere=length)
  return source, target


def _moved(starts, sizes, targets, length: int, *, nowhere: int) -> jax.Array:
  """Where each row of a list of blocks stands in another list, int32.

  Args:
    starts: first row of each block, ascending.
    sizes: of the blocks.
    targets: where each block begins in the other list.
    length: rows of this list.
    nowhere: the answer for rows of no block.
  """
  rows = jnp.arange(length, dtype=jnp.int32)
  block = jnp.searchsorted(starts, rows, side="right", method="compare_all") - 1
  offset = rows - starts[block]
  return jnp.where(offset < sizes[block], targets[block] + offset, nowhere)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(k: int, x_ND, order_M, place_M):
  """A copy of its token for each row."""
  del place_M
  return x_ND[order_M // k]


def _spread_fwd(k, x_ND, order_M, place_M):
  return _spread(k, x_ND, order_M, place_M), place_M


def _spread_bwd(k, place_M, dy_MD):
  dy_NkD = dy_MD[place_M].reshape(-1, k, dy_MD.shape[1])
  dx_ND = jnp.sum(dy_NkD, axis=1, dtype=jnp.float32).astype(dy_MD.dtype)
  return dx_ND, None, None


_spread.defvjp(_spread_fwd, _spread_bwd)


@jax.custom_vjp
def _permute(x_RD, source, target):
  """y[i] = x[source[i]], 0 where there is no such row; `target` undoes it."""
  del target
  return jnp.take(x_RD, source, axis=0, mode="fill", fill_value=0)


def _permute_fwd(x_RD, source, target):
  return _permute(x_RD, source, target), (source, target)


def _permute_bwd(saved, dy_RD):
  source, target = saved
  return _permute(dy_RD, target, source), None, None


_permute.defvjp(_permute_fwd, _permute_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(wire: Wire, length: int, there: _Route, back: _Route, x_MD):
  """Rows to their devices; [length, D], the rows that came, by sender."""
  del back
  if wire.ragged:
    came = jnp.zeros((length, x_MD.shape[1]), x_MD.dtype)
    return jax.lax.ragged_all_to_all(
      x_MD, came, *there[:3], there.arriving, axis_name=wire.axes
    )
  X, bound = len(there.starts), wire.bound
  rows = there.starts[:, None] + jnp.arange(bound, dtype=jnp.int32)[None]
  # Past the end of what goes to a peer stand rows that it does not read.
  sent = x_MD.at[rows].get(mode="clip")
  came = jax.lax.all_to_all(sent, wire.axes, 0, 0).reshape(X * bound, -1)
  parts = bound * jnp.arange(X, dtype=jnp.int32)
  at = _moved(there.arrivals, there.arriving, parts, length, nowhere=X * bound)
  return jnp.take(came, at, axis=0, mode="fill", fill_value=0)


def _exchange_fwd(wire, length, there, back, x_MD):
  # The empty array carries the number of rows.
  saved = there, back, jnp.zeros((len(x_MD), 0))
  return _exchange(wire, length, there, back, x_MD), saved


def _exchange_bwd(wire, length, saved, dy):
  there, back, x_like = saved
  return None, None, _exchange(wire, len(x_like), back, there, dy)


_exchange.defvjp(_exchange_fwd, _exchange_bwd)
