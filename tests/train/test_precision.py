"""The table of `model/precision.py`, held against the traced training step.

Every equation of the step (forward, backward, optimizer) is visited. Casts
between float dtypes, and arithmetic below float32, may happen only where the
table says so; and each entry of the table must happen.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from model.precision import POLICIES
from model.transformer import Transformer
from sharding.arrays import to_global
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from tests.train import tiny
from tests.train.jaxprs import equations, place
from train.config import OptimizerConfig

# Every feature that could hide a cast.
EVERYTHING = dataclasses.replace(
  tiny.GQA,
  layer_pattern=("local", "global"),
  norm="layer",
  norm_bias=True,
  norm_placement="sandwich",
  out_bias=True,
  mlp_bias=True,
  attention_softcap=5.0,
  logit_softcap=9.0,
  embed_dropout=0.1,
  residual_dropout=0.1,
  attention_dropout=0.1,
)

LINEAR = "model/linear.py"
ATTENTION = "pallas_kernels/flash_attention/op.py"
HEAD = "pallas_kernels/dot.py"
MATMULS = {LINEAR, ATTENTION, HEAD}

DOWN, UP = ("float32", "bfloat16"), ("bfloat16", "float32")
# Matmul operands, and nothing else, become bf16.
OPERANDS = {(file, *DOWN) for file in MATMULS}
# With a bf16 residual stream, what computes in float32 casts in and out.
STREAM = {
  (file, *cast)
  for cast in (DOWN, UP)
  for file in (
    "model/embed.py",  # the embedding enters the stream
    "model/norms.py",
    "pallas_kernels/rotary/op.py",
    "model/mlp.py",  # the activation function
    "pallas_kernels/linear_cross_entropy/op.py",  # so does its gradient
    LINEAR,  # the bias, and the gradient of the weights
  )
} | {
  # The gradient of a chunk, and whether padding is finite.
  ("pallas_kernels/linear_cross_entropy/xla.py", *DOWN),
  ("pallas_kernels/linear_cross_entropy/padding.py", *UP),
}
CASTS = {"float32": set(), "bf16_operands": OPERANDS, "bf16": OPERANDS | STREAM}

PRODUCTS = {("dot_general", file) for file in MATMULS}
ARITHMETIC = {
  "float32": set(),
  "bf16_operands": PRODUCTS,
  "bf16": PRODUCTS
  | {
    ("add", "model/block.py"),  # the residual stream
    ("add_any", LINEAR),  # sums of its cotangents
    ("add_any", "model/norms.py"),
    ("div", "model/dropout.py"),
    ("reduce_scatter", "model/embed.py"),  # all terms but one are 0
  },
}
# Move or choose values, and round none.
LAYOUT = {
  "all_gather",
  "all_to_all",
  "broadcast_in_dim",
  "concatenate",
  "copy",
  "dynamic_slice",
  "dynamic_update_slice",
  "empty",
  "empty2",
  "gather",
  "name",
  "pad",
  "reshape",
  "reshard",
  "select_n",
  "sharding_constraint",
  "slice",
  "split",
  "squeeze",
  "transpose",
}


@functools.cache
def step_equations(policy: str) -> list:
  """All equations of a step in two micro-batches on eight devices."""
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  model = jax.eval_shape(lambda: Transformer(EVERYTHING, rngs=nnx.Rngs(0)))
  model = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model)
  state, step = tiny.start(
    model,
    OptimizerConfig(),
    mesh,
    accumulation=2,
    remat="block",
    precision=POLICIES[policy],
  )
  batch = to_global(tiny.packed_batch(), mesh, Rules())
  traced = step.on_leaves.trace(jax.tree.leaves(state), batch)
  return list(equations(traced.jaxpr))


def floats(variables) -> list[str]:
  """The float dtypes among the operands or results of an equation."""
  dtypes = [getattr(v.aval, "dtype", None) for v in variables]
  return [
    str(d) for d in dtypes if d is not None and jnp.issubdtype(d, jnp.floating)
  ]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_casts_but_those_of_the_table(policy):
  found = set()
  for equation in step_equations(policy):
    if equation.primitive.name == "convert_element_type":
      before, after = floats(equation.invars), floats(equation.outvars)
      if before and after and before != after:
        found.add((place(equation), *before, *after))
  assert found == CASTS[policy]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_arithmetic_below_float32_but_that_of_the_table(policy):
  found = set()
  for equation in step_equations(policy):
    name = equation.primitive.name
    if name == "convert_element_type" or name in LAYOUT:
      continue
    if any(True for _ in jaxprs_in_params(equation.params)):
      continue  # a loop or a call: its equations are visited
    if set(floats([*equation.invars, *equation.outvars])) - {"float32"}:
      found.add((name, place(equation)))
  assert found == ARITHMETIC[policy]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_matmul_has_the_policys_operands(policy):
  operands = POLICIES[policy].operands
  products = [
    (floats(e.invars), floats(e.outvars))
    for e in step_equations(policy)
    if e.primitive.name == "dot_general"
  ]
  # Seven matmuls and two of attention a layer, and the head; forward, forward
  # again, and twice backward.
  assert len(products) > 30
  assert all(p == ([operands] * 2, ["float32"]) for p in products)
