"""The compiled half of generation: read prompts, then one token at a time."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.execution import Execution
from model.kv_cache import KVCache
from serve import beam, sampler


class State(NamedTuple):
  """R rows in the middle of their answers; M tokens fit.

  Attributes:
    cache: keys and values of all tokens but the newest; () where none is
      needed.
    ids: int32 [R, M]; the newest stands at `count` - 1.
    log_probs: float32 [R, M].
    count: int32 [], tokens so far of the rows that go on.
    counts: int32 [R], tokens of each row.
    positions: int32 [R], of the newest token.
    done: bool [R].
  """

  cache: KVCache | tuple[()]
  ids: jax.Array
  log_probs: jax.Array
  count: jax.Array
  counts: jax.Array
  positions: jax.Array
  done: jax.Array


class Rows(NamedTuple):
  """What the rows keep from start to end.

  Attributes:
    keys: a typed random key a row.
    knobs: settings of each row.
    limits: int32 [R], most tokens of each row.
    stop_ids: int32 [n], -1 matches none.
  """

  keys: jax.Array
  knobs: sampler.Knobs
  limits: jax.Array
  stop_ids: jax.Array


@jax.jit
def row_keys(seed, prompts_R, samples_R):
  """A key for each (seed, prompt, sample): nothing else decides a draw."""
  fold = jax.vmap(jax.random.fold_in, in_axes=(0, 0))
  base = jnp.broadcast_to(jax.random.key(seed), prompts_R.shape)
  return fold(fold(base, prompts_R), samples_R)


def _prefill(model, tokens_BT, lengths_B, *, copies, slots, execution):
  """The cache of R = B x copies rows, and logits [B, V] of their next token."""
  B, T = tokens_BT.shape
  dtype = execution.precision.operands
  stacked = not isinstance(model.layers, nnx.List)
  cache = KVCache.zeros(model.config, B, T, dtype, stacked=stacked)
  real_BT = jnp.arange(T)[None] < lengths_B[:, None]
  hidden_BTD, cache = model(
    tokens_BT,
    segment_ids=real_BT.astype(jnp.int32),
    cache=cache,
    execution=execution,
  )
  last_B = jnp.maximum(lengths_B - 1, 0)
  last_B1D = jnp.take_along_axis(hidden_BTD, last_B[:, None, None], axis=1)
  cache = cache.resized(slots).take(jnp.repeat(jnp.arange(B), copies))
  return cache, model.logits(last_B1D, execution)[:, 0]


def _append(model, cache, tokens_R, positions_R, active_R, execution):
  """Logits [R, V] after one more token a row, and the cache with it."""
  hidden_R1D, cache = model(
    tokens_R[:, None],
    positions=positions_R[:, None],
    segment_ids=active_R[:, None].astype(jnp.int32),
    cache=cache,
    execution=execution,
  )
  return model.logits(hidden_R1D, execution)[:, 0], cache


def _draw(state: State, logits_RV, rows: Rows) -> State:
  """The state with one more token in each row that is not done."""
  i = state.count
  tokens_R, log_probs_R = sampler.sample(rows.keys, i, logits_RV, rows.knobs)
  stops_R = (tokens_R[:, None] == rows.stop_ids[None]).any(axis=1)
  counts = jnp.where(state.done, state.counts, i + 1)
  return state._replace(
    ids=state.ids.at[:, i].set(tokens_R),
    log_probs=state.log_probs.at[:, i].set(log_probs_R),
    count=i + 1,
    counts=counts,
    positions=state.positions + 1,
    done=state.done | stops_R | (counts >= rows.limits),
  )


def start(
  model, tokens_BT, lengths_B, rows, *, copies, slots, room, execution
) -> State:
  """Reads the prompts and draws the first token.

  Args:
    model: the weights.
    tokens_BT: prompts, padded on the right.
    lengths_B: tokens of each prompt; 0 for a row that is none.
    rows: settings of the R = B x copies rows.
    copies: rows of each prompt.
    slots: of the cache.
    room: tokens that fit into `State.ids`.
    execution: how to run.
  """
  lengths_R = np.repeat(lengths_B, copies)
  R = len(lengths_R)
  cache, logits_RV = _read(
    model,
    tokens_BT,
    lengths_B,
    copies=copies,
    slots=slots,
    execution=execution,
  )
  state = State(
    cache=(),
    ids=np.zeros((R, room), np.int32),
    log_probs=np.zeros((R, room), np.float32),
    count=np.int32(0),
    counts=np.zeros((R,), np.int32),
    positions=lengths_R - 1,
    done=lengths_R == 0,
  )
  # The cache stays out: a draw is compiled once for prompts of any length.
  state = _first(state, logits_RV, rows, execution=execution)
  return state._replace(cache=cache)


@functools.partial(jax.jit, static_argnames=("copies", "slots", "execution"))
def _read(model, tokens_BT, lengths_B, *, copies, slots, execution):
  """The cache after the prompts, and logits [R, V] of their next token."""
  cache, logits_BV = _prefill(
    model, tokens_BT, lengths_B, copies=copies, slots=slots, execution=execution
  )
  return _placed_cache(cache, execution), jnp.repeat(logits_BV, copies, axis=0)


@functools.partial(jax.jit, static_argnames=("execution",))
def _first(state, logits_RV, rows, *, execution):
  """The state with its first token drawn."""
  return _placed(_draw(state, logits_RV, rows), execution)


@functools.partial(
  jax.jit, static_argnames=("execution",), donate_argnames=("state",)
)
def decode(model, state, rows, until, stopped_R, *, execution):
  """Draws until every row is done or has `until` tokens."""

  def going_on(state):
    return (state.count < until) & ~state.done.all()

  def advance(state):
    i = jnp.maximum(state.count - 1, 0)
    logits_RV, cache = _append(
      model,
      state.cache,
      state.ids[:, i],
      state.positions,
      ~state.done,
      execution,
    )
    return _draw(state._replace(cache=cache), logits_RV, rows)

  state = state._replace(done=state.done | stopped_R)
  return _placed(jax.lax.while_loop(going_on, advance, state), execution)


@functools.partial(
  jax.jit,
  static_argnames=("num_beams", "max_new_tokens", "slots", "execution"),
)
def search(
  model,
  tokens_BT,
  lengths_B,
  length_penalty,
  stop_ids,
  *,
  num_beams,
  max_new_tokens,
  slots,
  execution,
):
  """Beam search from prompts; see `serve.beam.search`."""
  cache, logits_BV = _prefill(
    model,
    tokens_BT,
    lengths_B,
    copies=num_beams,
    slots=slots,
    execution=execution,
  )

  def step(state, tokens_R):
    cache, positions_R = state
    active_R = jnp.ones_like(tokens_R)
    logits_RV, cache = _append(
      model, cache, tokens_R, positions_R, active_R, execution
    )
    return logits_RV, (cache, positions_R + 1)

  return beam.search(
    step,
    lambda state, rows_R: (state[0].take(rows_R), state[1][rows_R]),
    (cache, jnp.repeat(lengths_B, num_beams)),
    logits_BV,
    num_beams=num_beams,
    max_new_tokens=max_new_tokens,
    length_penalty=length_penalty,
    stop_ids=stop_ids,
  )


def _placed(state: State, execution: Execution) -> State:
  """The state with fixed placements: what goes out comes in again."""
  rows = lambda x: execution.shard(x, ("batch",) + (None,) * (x.ndim - 1))
  cache = state.cache and _placed_cache(state.cache, execution)
  fixed = jax.tree.map(
    lambda x: rows(x) if x.ndim else x, state._replace(cache=())
  )
  return fixed._replace(cache=cache, count=execution.shard(state.count, ()))


def _placed_cache(cache: KVCache, execution: Execution) -> KVCache:
  """The cache, split over rows and heads."""
  heads = lambda x: execution.shard(
    x, (None,) * (x.ndim - 4) + ("batch", "kv_heads", None, None)
  )
  return dataclasses.replace(
    cache,
    k=jax.tree.map(heads, cache.k),
    v=jax.tree.map(heads, cache.v),
    positions=execution.shard(cache.positions, ("batch", None)),
  )
