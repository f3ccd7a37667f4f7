"""Attention: one function, several implementations, no silent approximation."""

import jax
import jax.numpy as jnp

from pallas_kernels import impls
from pallas_kernels.flash_attention import gpu, reference, tpu, xla
from pallas_kernels.flash_attention.attend import attend
from pallas_kernels.flash_attention.epilogue import with_sinks, without_padding
from pallas_kernels.flash_attention.options import (
  LEAST,
  Options,
  Rows,
  Window,
  sides,
)

_ALL = frozenset(
  {
    "bidirectional window",
    "dropout_rate",
    "operands='float32'",
    "q_offset",
    "q_positions",
    "q_segment_ids",
    "return_lse",
    "sinks",
    "soft_cap",
    "window",
  }
)
HONOURS = {
  "reference": _ALL,
  "xla": _ALL,
  "tpu": _ALL,
  "gpu": frozenset({"window"}),
}


def flash_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  causal: bool = True,
  window: Window = None,
  q_offset: int | jax.Array | None = None,
  q_positions: jax.Array | None = None,
  k_positions: jax.Array | None = None,
  q_segment_ids: jax.Array | None = None,
  k_segment_ids: jax.Array | None = None,
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
  """Softmax attention of N query heads over K key/value heads, N = G K.

  Query head n reads key head n // G. Rows that may see no key give 0, and
  gradient 0; what stands in padding, NaN included, touches nothing. Scores,
  softmax and accumulation are float32.

  Args:
    q_BTNH: queries.
    k_BSKH: keys.
    v_BSKH: values.
    causal: a query sees keys at its own position and before.
    window: a query sees keys less than so many positions away; or a pair
      (left, right) of how many positions before and after it are seen, None
      for all. None: all.
    q_offset: position of the first query where keys stand at 0, 1, ...: the
      length of a cache. An int, or int32 of shape [] or [B].
    q_positions: int32 [B, T]; None: the index of the row. Tokens of a
      segment must stand in order when positions are left out.
    k_positions: int32 [B, S]; given together with `q_positions`.
    q_segment_ids: int32 [B, T]; a query sees keys of its own segment only,
      and segment 0 is padding. None: all rows are of one segment.
    k_segment_ids: int32 [B, S]; given together with `q_segment_ids`.
    scale: multiplies scores; None: H ** -0.5.
    soft_cap: scores become soft_cap * tanh(scores / soft_cap).
    sinks_N: float32, a score a head that joins the softmax but has no value
      (arXiv:2309.17453 in the learned form of gpt-oss).
    dropout_rate: of attention probabilities.
    dropout_words_2BNT: of `dropout.row_words`; None: no dropout.
    return_lse: also give the logsumexp of the scores of each query.
    operands: dtype of matmul operands, in both directions.
    out_dtype: of the output.
    impl: "reference" (O(T S) memory), "xla" (O(T)), "tpu" (Pallas; interpreted
      on other platforms), "gpu" (cuDNN), or "auto".
    platform: of the devices that will run this, for "auto"; None: JAX's
      default.

  Returns:
    [B, T, N, H]; with `return_lse` also float32 [B, T, N], -1e30 where a
    query sees nothing.

  Raises:
    ValueError: shapes disagree, or `impl` is not known or cannot honour an
      argument.
  """
  B, T, N, H = q_BTNH.shape
  S, K = k_BSKH.shape[1:3]
  if k_BSKH.shape != (B, S, K, H) or v_BSKH.shape != k_BSKH.shape:
    raise ValueError(
      f"wanted k and v of shape [{B}, S, K, {H}] to fit q {q_BTNH.shape}, got"
      f" k {k_BSKH.shape} and v {v_BSKH.shape}"
    )
  if N % K:
    raise ValueError(f"{N} query heads are not a multiple of {K} key heads")
  if sinks_N is not None and sinks_N.shape != (N,):
    raise ValueError(f"wanted sinks of shape [{N}], got {sinks_N.shape}")
  if dropout_words_2BNT is not None:
    if dropout_words_2BNT.shape != (2, B, N, T):
      raise ValueError(
        f"wanted dropout words of shape {(2, B, N, T)}, got"
        f" {dropout_words_2BNT.shape}"
      )
  if (q_segment_ids is None) != (k_segment_ids is None):
    raise ValueError("give q_segment_ids and k_segment_ids both, or neither")
  left, right = sides(causal, window)
  offset, q_index, k_index = _positions(
    T, S, q_offset, q_positions, k_positions
  )
  if dropout_words_2BNT is None:
    dropout_rate = 0.0

  uses = {
    "bidirectional window": (left, right) != (None, None) and right != 0,
    "dropout_rate": dropout_rate > 0.0,
    "operands='float32'": operands == "float32",
    "q_offset": q_offset is not None,
    "q_positions": q_positions is not None,
    "q_segment_ids": q_segment_ids is not None,
    "return_lse": return_lse,
    "sinks": sinks_N is not None,
    "soft_cap": soft_cap is not None,
    "window": left is not None,
  }
  request = impls.Request(
    "flash_attention",
    impl,
    frozenset(name for name, use in uses.items() if use),
  )
  impl = impls.choose(request, HONOURS, platform)
  options = Options(
    left=left,
    right=right,
    scale=H**-0.5 if scale is None else scale,
    soft_cap=soft_cap,
    dropout_rate=dropout_rate,
    operands=operands,
    out_dtype=out_dtype,
  )
  words = dropout_words_2BNT if dropout_rate > 0.0 else None
  # A weight of 0 does not hide a NaN: 0 NaN = NaN.
  q = without_padding(q_BTNH, q_segment_ids)
  k = without_padding(k_BSKH, k_segment_ids)
  v = without_padding(v_BSKH, k_segment_ids)
  arrays = q, k, v, Rows(q_index, q_segment_ids), Rows(k_index, k_segment_ids)
  if impl == "gpu":
    return gpu.attend(options, q, k, v)
  if impl == "reference":
    out, lse = reference.attend(options, *arrays, words)
  else:
    module = tpu if impl == "tpu" else xla
    out, lse = attend(module, options, offset, *arrays, words)
  if sinks_N is not None:
    out, lse = with_sinks(out, lse, sinks_N)
  # For the cotangents: those of padding rows have no meaning either.
  out = without_padding(out, q_segment_ids)
  if not return_lse:
    return out
  if q_segment_ids is not None:
    lse = jnp.where(q_segment_ids[:, :, None] != 0, lse, LEAST)
  return out, lse


def _positions(T: int, S: int, q_offset, q_positions, k_positions):
  """Where queries and keys stand.

  Returns:
    The static offset of queries where all positions just count up, else
    None; and the positions of queries and of keys, int32 [1 or B, T or S].
  """
  if (q_positions is None) != (k_positions is None):
    raise ValueError("give q_positions and k_positions both, or neither")
  if q_positions is not None:
    if q_offset is not None:
      raise ValueError("give q_offset or q_positions, not both")
    return None, q_positions, k_positions
  if q_offset is None and T != S:
    raise ValueError(
      f"{T} queries and {S} keys: where do they stand? Set q_offset, or"
      " q_positions and k_positions"
    )
  count = lambda size: jnp.arange(size, dtype=jnp.int32)[None]
  q_offset = 0 if q_offset is None else q_offset
  offset = q_offset if isinstance(q_offset, int) else None
  q_index = count(T) + jnp.asarray(q_offset, jnp.int32).reshape(-1, 1)
  return offset, q_index, count(S)
