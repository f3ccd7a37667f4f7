"""Which dtype each op computes in, and the matmul that honours it.

The table of a policy, op by op:

| op                                       | dtype                       |
|------------------------------------------|-----------------------------|
| parameters, optimizer, gradients of them | float32                     |
| matmul operands, forward and backward    | `operands`                  |
| matmul accumulation                      | float32                     |
| matmul results, residual stream          | `activations`               |
| norms, softmax, soft-caps, rotary, loss, | float32                     |
| activation functions, routers            |                             |

Mixed precision with float32 master weights: arXiv:1710.03740.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot


@dataclasses.dataclass(frozen=True)
class Precision:
  """Dtypes, by name, of the two things a policy may choose."""

  activations: str
  operands: str


# XLA on CPU multiplies bf16 faster than float32 but is slow at everything
# else in bf16: there the residual stream stays float32.
POLICIES = {
  "float32": Precision("float32", "float32"),
  "bf16": Precision("bfloat16", "bfloat16"),
  "bf16_operands": Precision("float32", "bfloat16"),
}


def resolve(name: str, platform: str) -> Precision:
  """The policy called `name`; "auto" takes the fast bf16 form of `platform`.

  Args:
    name: a key of `POLICIES`, or "auto".
    platform: "cpu", "gpu" or "tpu", of the devices that will run it.

  Raises:
    ValueError: there is no such policy.
  """
  if name == "auto":
    name = "bf16_operands" if platform == "cpu" else "bf16"
  if name not in POLICIES:
    raise ValueError(
      f"precision must be 'auto' or one of {sorted(POLICIES)}, got {name!r}"
    )
  return POLICIES[name]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def einsum(equation: str, x, w, precision: Precision):
  """Two-operand einsum under a precision policy, in both directions.

  Autodiff alone would multiply the float32 cotangent with bf16 operands,
  which no hardware does at bf16 speed; here it is cast first.

  Args:
    equation: "in,weight->out"; every letter occurs in two of the three.
    x: activations.
    w: weights, float32.
    precision: the policy.

  Returns:
    The product, in `precision.activations`.
  """
  return dot(equation, x, w, precision.operands).astype(precision.activations)


def _einsum_fwd(equation, x, w, precision):
  x_saved = x.astype(precision.operands)
  # The empty arrays carry the dtypes that the gradients must have.
  dtypes = jnp.zeros((0,), x.dtype), jnp.zeros((0,), w.dtype)
  return einsum(equation, x_saved, w, precision), (x_saved, w, dtypes)


def _einsum_bwd(equation, precision, saved, g):
  x, w, (x_like, w_like) = saved
  inputs, out = equation.split("->")
  x_dims, w_dims = inputs.split(",")
  g = g.astype(precision.operands)
  dx = dot(f"{out},{w_dims}->{x_dims}", g, w, precision.operands)
  dw = dot(f"{x_dims},{out}->{w_dims}", x, g, precision.operands)
  return dx.astype(x_like.dtype), dw.astype(w_like.dtype)


einsum.defvjp(_einsum_fwd, _einsum_bwd)
