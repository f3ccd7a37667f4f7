"""Matmul of sorted rows, each group with its own weights.

It is what a dropless mixture of experts needs (arXiv:2211.15841): tokens are
sorted by expert and no expert has a capacity.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import impls
from pallas_kernels.grouped_matmul import gpu, reference, tpu, xla

# M rows, D and F features, E groups.

_IMPLS = {"reference": reference, "xla": xla, "tpu": tpu, "gpu": gpu}
# Nothing is optional: each honours every argument.
HONOURS = {impl: frozenset() for impl in _IMPLS}


class _Static(NamedTuple):
  """What is known when the op is traced."""

  impl: str
  transpose_w: bool
  operands: str


def grouped_matmul(
  x_MD: jax.Array,
  w_EDF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  transpose_w: bool = False,
  operands: str = "float32",
  impl: str = "auto",
  platform: str | None = None,
) -> jax.Array:
  """Row i times the weights of the group that row i is in.

  The first group_sizes[0] rows are of group 0, the next group_sizes[1] of
  group 1, and so on. Rows past the last group give 0 and gradient 0 and may
  hold anything, NaN included; so do their cotangents. An empty group has
  gradient 0. Accumulation is in float32.

  Args:
    x_MD: rows sorted by group.
    w_EDF: weights of each group; [E, F, D] with `transpose_w`.
    group_sizes_E: int32, not negative; what goes past M is cut.
    transpose_w: the weights lie transposed, and are read so.
    operands: dtype of matmul operands, in both directions.
    impl: "reference" (E times the work), "xla", "tpu", "gpu", or "auto".
    platform: of the devices that will run it, for "auto"; None: JAX's own.

  Returns:
    [M, F] in the dtype of x. Gradients have the dtypes of x and w.

  Raises:
    ValueError: shapes or the dtype of the sizes disagree, or there is no such
      impl.
  """
  M, D = x_MD.shape
  E = w_EDF.shape[0]
  wanted = f"[{E}, F, {D}]" if transpose_w else f"[{E}, {D}, F]"
  if w_EDF.ndim != 3 or w_EDF.shape[2 if transpose_w else 1] != D:
    raise ValueError(
      f"wanted w of shape {wanted} to fit x {x_MD.shape} with transpose_w ="
      f" {transpose_w}, got {w_EDF.shape}"
    )
  if group_sizes_E.shape != (E,) or group_sizes_E.dtype != jnp.int32:
    raise ValueError(
      f"wanted group_sizes int32 [{E}], one a group of w, got"
      f" {group_sizes_E.dtype} {group_sizes_E.shape}"
    )
  request = impls.Request("grouped_matmul", impl, frozenset())
  chosen = impls.choose(request, HONOURS, platform)
  static = _Static(chosen, transpose_w, operands)
  if M == 0:
    return jnp.zeros((0, w_EDF.shape[1 if transpose_w else 2]), x_MD.dtype)
  return _multiply(static, x_MD, w_EDF, group_sizes_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(static: _Static, x, w, group_sizes):
  return _multiply_fwd(static, x, w, group_sizes)[0]


def _multiply_fwd(static, x, w, group_sizes):
  # The empty array carries the dtype that the gradient of x must have.
  x_like = jnp.zeros((0,), x.dtype)
  x = x.astype(static.operands)
  out = _IMPLS[static.impl].multiply(
    x,
    w.astype(static.operands),
    group_sizes,
    transpose_w=static.transpose_w,
    dtype=x_like.dtype,
  )
  return out, (x, w, group_sizes, x_like)


def _multiply_bwd(static, saved, dout):
  x, w, group_sizes, x_like = saved
  impl = _IMPLS[static.impl]
  dout = dout.astype(static.operands)
  dx = impl.multiply(
    dout,
    w.astype(static.operands),
    group_sizes,
    transpose_w=not static.transpose_w,
    dtype=x_like.dtype,
  )
  pair = (dout, x) if static.transpose_w else (x, dout)
  dw = impl.outer(*pair, group_sizes, dtype=w.dtype)
  return dx, dw, None


_multiply.defvjp(_multiply_fwd, _multiply_bwd)
