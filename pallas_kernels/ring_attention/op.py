"""Attention of a sequence that is split over devices (context parallelism).

The queries of a device stay where they are and meet the keys of all: one
device's at a time, which travel in a ring (arXiv:2310.01889), or gathered
(arXiv:2407.21783, section 3.3.2). Parts are merged by their logsumexps. Only
what `flash_attention` saves is saved: keys travel once more in the backward
pass, and in the ring their gradients travel with them.
"""

import functools
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import impls
from pallas_kernels.flash_attention import tpu, xla
from pallas_kernels.flash_attention.attend import laid_cotangents, saved
from pallas_kernels.flash_attention.epilogue import with_sinks, without_padding
from pallas_kernels.flash_attention.options import (
  LEAST,
  Options,
  Rows,
  Window,
  sides,
)
from pallas_kernels.ring_attention.order import rows_of

FORMS = ("ring", "all_gather")
_MODULES = {"xla": xla, "tpu": tpu, "gpu": xla}
# All honour all that this op can ask.
HONOURS = {impl: frozenset() for impl in _MODULES}


class _How(NamedTuple):
  """The static part of a call."""

  impl: ModuleType
  options: Options
  axis_name: str
  form: str


def ring_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  *,
  axis_name: str,
  form: str = "ring",
  order: str = "contiguous",
  positions: jax.Array | None = None,
  causal: bool = True,
  window: Window = None,
  segment_ids: jax.Array | None = None,
  scale: float | None = None,
  soft_cap: float | None = None,
  sinks_N: jax.Array | None = None,
  dropout_rate: float = 0.0,
  dropout_words_2BNT: jax.Array | None = None,
  return_lse: bool = False,
  operands: str = "float32",
  out_dtype: str = "float32",
  impl: str = "auto",
  platform: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """`flash_attention` of rows that are split over a mesh axis.

  Inside `jax.shard_map`, where arrays are a device's own. All that is not said
  here is as in `flash_attention`.

  Args:
    q_BTNH: queries.
    k_BTKH: keys of the same rows.
    v_BTKH: values.
    axis_name: the mesh axis of the devices among which rows are split.
    form: "ring": O(T) memory; "all_gather": all keys at once, one collective
      in place of many.
    order: which rows a device holds, see `order.rows_of`.
    positions: int32 [B, T], of queries and keys, in place of an order: what
      causality and windows compare. Rows may then stand anywhere.
    causal: as there.
    window: as there.
    segment_ids: int32 [B, T], of queries and keys.
    scale: as there.
    soft_cap: as there.
    sinks_N: as there.
    dropout_rate: as there.
    dropout_words_2BNT: of `dropout.row_words`, with the numbers of the rows in
      the whole sequence. Keys count by their positions.
    return_lse: as there.
    operands: as there.
    out_dtype: as there.
    impl: of the attention of a part: "xla", "tpu", "gpu" (that of XLA) or
      "auto".
    platform: as there.

  Returns:
    As there.

  Raises:
    ValueError: shapes disagree; `form`, `order` or `impl` is not known; both
      an order and positions are given.
  """
  N, H = q_BTNH.shape[2:]
  B, T, K, _ = k_BTKH.shape
  if q_BTNH.shape != (B, T, N, H) or v_BTKH.shape != k_BTKH.shape:
    raise ValueError(
      f"wanted q of shape [{B}, {T}, N, H] and v of k's, {k_BTKH.shape}; got q"
      f" {q_BTNH.shape} and v {v_BTKH.shape}"
    )
  if N % K:
    raise ValueError(f"{N} query heads are not a multiple of {K} key heads")
  if form not in FORMS:
    raise ValueError(f"form must be one of {FORMS}, got {form!r}")
  if positions is not None and order != "contiguous":
    raise ValueError(f"give positions or order={order!r}, not both")
  request = impls.Request("ring_attention", impl, frozenset())
  left, right = sides(causal, window)
  options = Options(
    left=left,
    right=right,
    scale=H**-0.5 if scale is None else scale,
    soft_cap=soft_cap,
    dropout_rate=dropout_rate,
    operands=operands,
    out_dtype="float32",  # of parts
  )
  module = _MODULES[impls.choose(request, HONOURS, platform)]
  how = _How(module, options, axis_name, form)
  num, device = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  if positions is None:
    positions = rows_of(order, num, device, T)[None]
  rows = Rows(positions, segment_ids)
  words = dropout_words_2BNT if dropout_rate > 0.0 else None
  q, k, v = (without_padding(x, segment_ids) for x in (q_BTNH, k_BTKH, v_BTKH))
  out, lse = _attend(how, q, k, v, rows, words)
  if sinks_N is not None:
    out, lse = with_sinks(out, lse, sinks_N)
  out = without_padding(out, segment_ids).astype(out_dtype)
  if not return_lse:
    return out
  if segment_ids is not None:
    lse = jnp.where(segment_ids[:, :, None] != 0, lse, LEAST)
  return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: _How, q, k, v, rows: Rows, words):
  """Output [B, T, N, H] and logsumexp [B, T, N], float32."""
  return _attend_fwd(how, q, k, v, rows, words)[0]


def _attend_fwd(how, q, k, v, rows, words):
  impl, options = how.impl, how.options
  dtypes = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), (q, k, v))
  nothing = (
    jnp.zeros(q.shape, jnp.float32),
    jnp.full(q.shape[:3], LEAST, jnp.float32),
  )
  q, k, v = (impl.laid(options, x) for x in (q, k, v))

  def values(keys: _Keys):
    return impl.values(options, None, q, keys.k, keys.v, rows, keys.rows, words)

  def step(carry, _):
    sums, keys = carry
    # Keys travel on while these are read.
    return (_merged(sums, values(keys)), _shifted(how, keys)), None

  keys = _Keys(k, v, rows)
  if how.form == "all_gather":
    out, lse = values(_gathered(how, keys))
  else:
    num_steps = jax.lax.axis_size(how.axis_name) - 1
    carry, _ = jax.lax.scan(step, (nothing, keys), length=num_steps)
    sums, keys = carry
    out, lse = _merged(sums, values(keys))
  out, lse = saved(out, lse)
  return (out, lse), (q, k, v, rows, words, out, lse, dtypes)


def _attend_bwd(how, residuals, cotangents):
  q, k, v, rows, words, out, lse, dtypes = residuals
  impl, options = how.impl, how.options
  g, delta = laid_cotangents(impl, options, out, *cotangents)

  def gradients(keys: _Keys):
    known = rows, keys.rows, words, "float32"
    return impl.gradients(
      options, None, q, keys.k, keys.v, g, lse, delta, *known
    )

  def add(sums, keys):
    return jax.tree.map(jnp.add, sums, gradients(keys))

  def step(carry, _):
    (dq, dk, dv), keys = carry
    dq, dk, dv = add((dq, dk, dv), keys)
    dk, dv = _shifted(how, (dk, dv))
    return ((dq, dk, dv), _shifted(how, keys)), None

  keys = _Keys(k, v, rows)
  if how.form == "all_gather":
    dq, *dkv = gradients(_gathered(how, keys))
    home = functools.partial(
      jax.lax.psum_scatter,
      axis_name=how.axis_name,
      scatter_dimension=impl.ROWS_AXIS,
      tiled=True,
    )
    grads = dq, *map(home, dkv)
  else:
    num_steps = jax.lax.axis_size(how.axis_name) - 1
    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    (sums, keys), _ = jax.lax.scan(step, (zeros, keys), length=num_steps)
    dq, *dkv = add(sums, keys)
    grads = dq, *_shifted(how, tuple(dkv))
  cast = lambda x, like: impl.unlaid(x).astype(like.dtype)
  return *map(cast, grads, dtypes), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


class _Keys(NamedTuple):
  """What travels: laid vectors of some keys, and where they stand."""

  k: jax.Array
  v: jax.Array
  rows: Rows


def _merged(some, others):
  """Output and logsumexp of two sets of keys."""
  (out_1, lse_1), (out_2, lse_2) = some, others
  lse = jnp.logaddexp(lse_1, lse_2)
  share = lambda part: jnp.exp(part - lse)[..., None]
  return out_1 * share(lse_1) + out_2 * share(lse_2), lse


def _shifted(how: _How, arrays):
  """The same from the device before in the ring."""
  num = jax.lax.axis_size(how.axis_name)
  pairs = [(device, (device + 1) % num) for device in range(num)]
  shift = functools.partial(
    jax.lax.ppermute, axis_name=how.axis_name, perm=pairs
  )
  return jax.tree.map(shift, arrays)


def _gathered(how: _How, keys: _Keys) -> _Keys:
  """Those of all devices."""
  gather = functools.partial(
    jax.lax.all_gather, axis_name=how.axis_name, tiled=True
  )
  at = lambda axis: functools.partial(gather, axis=axis)
  rows = jax.tree.map(at(1), keys.rows)
  return _Keys(*map(at(how.impl.ROWS_AXIS), keys[:2]), rows)
