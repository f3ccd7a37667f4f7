"""What surrounds the kernels, the same for all: padding and sinks."""

import jax
import jax.numpy as jnp


def with_sinks(out_BTNH, lse_BTN, sinks_N):
  """The softmax with one more score, by what the others sum to."""
  sinks = sinks_N.astype(jnp.float32)[None, None]
  share = jax.nn.sigmoid(lse_BTN - sinks)
  out = (out_BTNH * share[..., None]).astype(out_BTNH.dtype)
  return out, jnp.logaddexp(lse_BTN, sinks)


def without_padding(x_BTNH: jax.Array, segment_ids: jax.Array | None):
  """The same with zeros in the rows of segment 0."""
  if segment_ids is None:
    return x_BTNH
  real = (segment_ids != 0)[:, :, None, None]
  return jnp.where(real, x_BTNH, jnp.zeros_like(x_BTNH))
