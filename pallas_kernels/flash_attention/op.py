"""Attention: one function, several implementations, no silent approximation."""

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention import reference, xla
from pallas_kernels.flash_attention.options import Options, Rows

IMPLS = ("reference", "xla")


def flash_attention(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  causal: bool = True,
  window: int | None = None,
  q_positions: jax.Array | None = None,
  k_positions: jax.Array | None = None,
  q_segment_ids: jax.Array | None = None,
  k_segment_ids: jax.Array | None = None,
  scale: float | None = None,
  soft_cap: float | None = None,
  dropout_rate: float = 0.0,
  dropout_keys_B: jax.Array | None = None,
  operands: str = "float32",
  impl: str = "auto",
) -> jax.Array:
  """Softmax attention of N query heads over K key/value heads, N = G K.

  Query head n reads key head n // G. Rows that may see no key give 0, and
  gradient 0; what stands in padding, NaN included, touches nothing. Scores,
  softmax and accumulation are float32.

  Args:
    q_BTNH: queries.
    k_BSKH: keys.
    v_BSKH: values.
    causal: a query sees keys at its own position and before.
    window: a query sees keys less than so many positions away; None: all.
    q_positions: int32 [B, T]; None: the index of the row. Tokens of a
      segment must stand in order when positions are left out.
    k_positions: int32 [B, S]; given together with `q_positions`.
    q_segment_ids: int32 [B, T]; a query sees keys of its own segment only,
      and segment 0 is padding. None: all rows are of one segment.
    k_segment_ids: int32 [B, S]; given together with `q_segment_ids`.
    scale: multiplies scores; None: H ** -0.5.
    soft_cap: scores become soft_cap * tanh(scores / soft_cap).
    dropout_rate: of attention probabilities.
    dropout_keys_B: a PRNG key a batch row; None: no dropout.
    operands: dtype of matmul operands, in both directions.
    impl: "reference" (O(T S) memory), "xla" (O(T)), or "auto".

  Returns:
    float32 [B, T, N, H].

  Raises:
    ValueError: shapes disagree, or `impl` is not known.
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
  if (q_positions is None) != (k_positions is None):
    raise ValueError("give q_positions and k_positions both, or neither")
  if (q_segment_ids is None) != (k_segment_ids is None):
    raise ValueError("give q_segment_ids and k_segment_ids both, or neither")
  if q_positions is None and T != S:
    raise ValueError(
      f"{T} queries and {S} keys: where do they stand? Set q_positions and"
      " k_positions"
    )
  if window is not None and window < 1:
    raise ValueError(f"window must be at least 1, got {window}")

  options = Options(
    causal=causal,
    window=window,
    scale=H**-0.5 if scale is None else scale,
    soft_cap=soft_cap,
    dropout_rate=dropout_rate,
    operands=operands,
  )
  ordered = q_positions is None
  if ordered:
    q_positions = k_positions = jnp.arange(T, dtype=jnp.int32)[None]
  queries = Rows(q_positions, q_segment_ids)
  keys = Rows(k_positions, k_segment_ids)
  # A weight of 0 does not hide a NaN: 0 NaN = NaN.
  q = _without_padding(q_BTNH, q_segment_ids)
  k = _without_padding(k_BSKH, k_segment_ids)
  v = _without_padding(v_BSKH, k_segment_ids)
  arrays = q, k, v, queries, keys, dropout_keys_B
  if impl in ("auto", "xla"):
    out = xla.attend(options, ordered, *arrays)
  elif impl == "reference":
    out = reference.attend(options, *arrays)
  else:
    raise ValueError(f"impl must be 'auto' or one of {IMPLS}, got {impl!r}")
  # For the cotangents: those of padding rows have no meaning either.
  return _without_padding(out, q_segment_ids)


def _without_padding(x_BTNH: jax.Array, segment_ids: jax.Array | None):
  """The same with zeros in the rows of segment 0."""
  if segment_ids is None:
    return x_BTNH
  real = (segment_ids != 0)[:, :, None, None]
  return jnp.where(real, x_BTNH, jnp.zeros_like(x_BTNH))
