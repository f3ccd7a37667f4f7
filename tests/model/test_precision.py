"""Policies, op by op, in the traced program; the matmul and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.execution import Execution
from model.losses import cross_entropy
from model.precision import POLICIES, einsum, resolve
from tests.model.jaxprs import equations
from tests.model.tiny import make, tokens
from tests.tolerances import tolerance

# Every feature that computes anything.
FEATURES = dict(
  norm_placement="sandwich",
  qk_norm=True,
  attention_softcap=5.0,
  logit_softcap=5.0,
  qkv_bias=True,
  out_bias=True,
  mlp_bias=True,
  layer_pattern=("local", "global"),
  window=3,
)
# They hold or move values, or call what does.
MOVES = {
  "broadcast_in_dim",
  "cond",
  "custom_vjp_call",
  "jit",
  "name",
  "pad",
  "reshape",
  "scan",
  "select_n",
  "slice",
  "transpose",
}
# The residual stream, and the sum of gradients that meet in it.
RESIDUAL = {"add", "add_any"}
CASTS = {"convert_element_type", "dot_general"}


def dtypes(equation) -> tuple[list[str], list[str]]:
  """Of inputs and outputs."""
  name = lambda x: str(getattr(x.aval, "dtype", ""))
  return [name(x) for x in equation.invars], [name(x) for x in equation.outvars]


def program(policy: str):
  """The gradient of the loss with everything switched on."""
  model = make(**FEATURES)
  execution = Execution(precision=POLICIES[policy], loss_chunk=8)

  def loss(model, tokens):
    hidden = model(
      tokens, segment_ids=jnp.ones_like(tokens), execution=execution
    )
    weights = jnp.ones(tokens.shape, jnp.float32)
    return cross_entropy(
      model, hidden, tokens, weights, z_loss=0.1, execution=execution
    )[0]

  return jax.make_jaxpr(jax.grad(loss))(model, tokens(2, 11))


@pytest.mark.parametrize(
  ("policy", "allowed"),
  [
    ("bf16", CASTS | MOVES | RESIDUAL),
    # The residual stream is float32: nothing but matmuls sees bfloat16.
    ("bf16_operands", CASTS | MOVES),
    ("float32", set()),
  ],
)
def test_no_other_op_sees_bfloat16(policy, allowed):
  jaxpr = program(policy)
  matmuls = 0
  for equation, _ in equations(jaxpr):
    name = equation.primitive.name
    inputs, outputs = dtypes(equation)
    assert not {"float16", "float64"} & {*inputs, *outputs}, equation
    if name == "dot_general":
      matmuls += 1
      want = POLICIES[policy].operands
      assert (inputs, outputs) == ([want] * 2, ["float32"]), equation
    if "bfloat16" in inputs + outputs:
      assert name in allowed, equation
    if policy == "bf16_operands" and name == "convert_element_type":
      assert inputs != ["bfloat16"], "a matmul result was rounded"
  # 8 projections and their 16 gradients, and attention of two kinds with 2
  # and 5: nothing was overlooked.
  assert matmuls == 3 * 8 + 2 * 7
  assert {str(x.dtype) for x in jaxpr.out_avals} == {"float32"}


@pytest.mark.parametrize(
  ("equation", "x_shape", "w_shape"),
  [
    ("BTD,DNH->BTNH", (2, 5, 7), (7, 3, 4)),
    ("BTNH,NHD->BTD", (2, 5, 3, 4), (3, 4, 7)),
    ("BTD,VD->BTV", (2, 5, 7), (11, 7)),
  ],
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_einsum_value_and_gradients(equation, x_shape, w_shape, policy):
  rng = np.random.default_rng(0)
  normal = lambda shape: rng.normal(size=shape).astype("float32")
  precision = POLICIES[policy]
  x, w = jnp.asarray(normal(x_shape), precision.activations), normal(w_shape)
  y, pull = jax.vjp(lambda x, w: einsum(equation, x, w, precision), x, w)
  g = jnp.asarray(normal(y.shape), y.dtype)
  dx, dw = pull(g)
  assert y.dtype == dx.dtype == precision.activations
  assert dw.dtype == jnp.float32

  # In float64, from operands that are rounded as the policy says: what is
  # left is the order of summation and one rounding of the result.
  rounded = lambda a: np.float64(jnp.asarray(a).astype(precision.operands))
  inputs, out = equation.split("->")
  x_dims, w_dims = inputs.split(",")
  einsum64 = lambda equation, a, b: np.einsum(equation, rounded(a), rounded(b))
  for got, want in (
    (y, einsum64(equation, x, w)),
    (dx, einsum64(f"{out},{w_dims}->{x_dims}", g, w)),
    (dw, einsum64(f"{x_dims},{out}->{w_dims}", x, g)),
  ):
    once = "elementwise" if got.dtype == jnp.bfloat16 else "matmul"
    np.testing.assert_allclose(
      np.float64(got), want, **tolerance(once, got.dtype)
    )


def test_resolve():
  assert resolve("auto", "cpu") == POLICIES["bf16_operands"]
  assert resolve("auto", "tpu") == resolve("auto", "gpu") == POLICIES["bf16"]
  assert resolve("float32", "tpu") == POLICIES["float32"]
  with pytest.raises(ValueError, match="'auto' or one of .*got 'fp16'"):
    resolve("fp16", "cpu")
