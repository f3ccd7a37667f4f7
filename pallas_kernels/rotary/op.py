"""Rotary position embedding (arXiv:2104.09864), one pass over memory.

XLA on a TPU makes three or four passes of it, some in float32: it does not fuse
slices of half a vector of lanes with what is before and after.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import impls
from pallas_kernels.rotary import reference, tpu

_IMPLS = {
  "reference": reference.rotate,
  "xla": reference.rotate,
  "tpu": tpu.rotate,
  "gpu": reference.rotate,
}
# Nothing is optional: each honours every argument.
HONOURS = {impl: frozenset() for impl in _IMPLS}


def rotary(
  x_BTNH: jax.Array,
  cos_BTP: jax.Array,
  sin_BTP: jax.Array,
  *,
  impl: str = "auto",
  platform: str | None = None,
) -> jax.Array:
  """Rotates the pairs of dims (i, i + P), P = H / 2, in float32.

  Args:
    x_BTNH: queries or keys.
    cos_BTP: float32, of the angle of each pair; a constant, whose gradient is
      0. B may be 1: the same for all rows.
    sin_BTP: the same.
    impl: "reference", "xla", "tpu", "gpu", or "auto".
    platform: of the devices that will run it, for "auto"; None: JAX's own.

  Returns:
    [B, T, N, H] in the dtype of x.

  Raises:
    ValueError: shapes disagree, or there is no such impl.
  """
  B, T, _, H = x_BTNH.shape
  fitting = [(rows, T, H / 2) for rows in (1, B)]
  if cos_BTP.shape not in fitting or sin_BTP.shape != cos_BTP.shape:
    raise ValueError(
      f"wanted cos and sin of shape [{B} or 1, {T}, {H} / 2] to fit x"
      f" {x_BTNH.shape}, got cos {cos_BTP.shape} and sin {sin_BTP.shape}"
    )
  request = impls.Request("rotary", impl, frozenset())
  chosen = impls.choose(request, HONOURS, platform)
  cos, sin = map(jax.lax.stop_gradient, (cos_BTP, sin_BTP))
  return _rotate(chosen, x_BTNH, cos, sin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(impl: str, x, cos, sin):
  return _IMPLS[impl](x, cos, sin)


def _rotate_fwd(impl, x, cos, sin):
  return _rotate(impl, x, cos, sin), (cos, sin)


def _rotate_bwd(impl, saved, dout):
  cos, sin = saved
  # A rotation's transpose is its inverse. (With a factor on both, as YaRN's,
  # the transpose is still this.)
  dx = _rotate(impl, dout, cos, -sin)
  return dx, jnp.zeros_like(cos), jnp.zeros_like(sin)


_rotate.defvjp(_rotate_fwd, _rotate_bwd)
