"""The gradient rule that implementations share.

An implementation is a module with

  laid(options, x_BTNH) -> x, vectors as its products take them, and
  unlaid(x) -> x_BTNH, the way back, and ROWS_AXIS, the T of laid vectors;
  values(options, offset, q, k, v, queries, keys, words) -> (out_BTNH, lse_BTN);
  gradients(options, offset, q, k, v, g, lse_BTN, delta_BTN, queries, keys,
    words, dtype) -> (dq, dk, dv)

whose vectors are laid. Only the output and the logsumexp of each query are
saved; probabilities are recomputed from them (arXiv:2205.14135, algorithm 4).
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.flash_attention.options import Options, Rows

# By which a rematerialisation policy can keep output and logsumexp.
SAVED_NAME = "attention"


def saved(out_BTNH: jax.Array, lse_BTN: jax.Array):
  """What the backward pass would have to attend again for, with a name."""
  return (
    checkpoint_name(out_BTNH, SAVED_NAME),
    checkpoint_name(lse_BTN, SAVED_NAME),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend(
  impl: ModuleType,
  options: Options,
  offset: int | None,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  queries: Rows,
  keys: Rows,
  words_2BNT: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Output [B, T, N, H] and logsumexp, float32 [B, T, N].

  Args:
    impl: see above.
    options: what is asked.
    offset: position of the first query where positions just count up, and
      those of keys do from 0; None: they are arrays.
    q_BTNH: queries.
    k_BSKH: keys.
    v_BSKH: values.
    queries: where each query stands.
    keys: where each key stands.
    words_2BNT: of `dropout.row_words`; None: no dropout.
  """
  arrays = q_BTNH, k_BSKH, v_BSKH, queries, keys, words_2BNT
  return _attend_fwd(impl, options, offset, *arrays)[0]


def _attend_fwd(impl, options, offset, q, k, v, *known):
  dtypes = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), (q, k, v))
  q, k, v = (impl.laid(options, x) for x in (q, k, v))
  out, lse = saved(*impl.values(options, offset, q, k, v, *known))
  return (out, lse), (q, k, v, known, out, lse, dtypes)


def _attend_bwd(impl, options, offset, residuals, cotangents):
  q, k, v, known, out, lse, dtypes = residuals
  g, delta = laid_cotangents(impl, options, out, *cotangents)
  dtype = jnp.result_type(*dtypes).name
  grads = impl.gradients(options, offset, q, k, v, g, lse, delta, *known, dtype)
  cast = lambda x, like: impl.unlaid(x).astype(like.dtype)
  return *map(cast, grads, dtypes), None, None, None


attend.defvjp(_attend_fwd, _attend_bwd)


def laid_cotangents(impl, options: Options, out_BTNH, g_BTNH, g_lse_BTN):
  """The cotangent of the output, laid, and delta, float32 [B, T, N].

  The gradient by a score is its probability times that by the probability
  less delta (arXiv:2205.14135, algorithm 4, line 19); a cotangent of the
  logsumexp adds to it with the other sign.
  """
  product = g_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)
  return impl.laid(options, g_BTNH), jnp.sum(product, axis=-1) - g_lse_BTN
