"""Every implementation against float64, values and gradients."""

import dataclasses
import functools
import importlib
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import tuning, xla
from pallas_kernels.grouped_matmul.op import HONOURS, grouped_matmul
from tests.model.jaxprs import equations, shapes
from tests.pallas_kernels.grouped_matmul import oracle
from tests.tolerances import tolerance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """What one compilation fixes; arrays, sizes included, come afterwards."""

  impl: str
  M: int = 53
  D: int = 40
  F: int = 24
  E: int = 5
  transpose_w: bool = False
  dtype: str = "float32"
  w_dtype: str = "float32"
  operands: str = "float32"
  tiles: tuple[int, int, int, int] = (16, 8, 16, 16)
  chunk: int = 8


# Of the TPU's kernels: blocks that divide no size, or all; several chunks a
# tile, or one; one block for all rows and features.
CASES = {
  "reference": Case(impl="reference"),
  "reference, transposed": Case(impl="reference", transpose_w=True),
  "xla": Case(impl="xla"),
  "xla, transposed": Case(impl="xla", transpose_w=True, chunk=16),
  "xla, one chunk": Case(impl="xla", M=11, chunk=128),
  "xla, bfloat16": Case(impl="xla", dtype="bfloat16", operands="bfloat16"),
  "gpu": Case(impl="gpu"),
  "gpu, transposed": Case(impl="gpu", transpose_w=True),
  "tpu": Case(impl="tpu"),
  "tpu, transposed": Case(impl="tpu", transpose_w=True),
  "tpu, sizes that divide": Case(
    impl="tpu", M=64, D=32, F=32, E=4, tiles=(8, 8, 16, 16)
  ),
  "tpu, one tile of one group": Case(
    impl="tpu", M=13, E=1, tiles=(64, 16, 24, 40)
  ),
  "tpu, more groups than rows": Case(impl="tpu", M=9, E=23, D=8, F=8),
  "tpu, bfloat16": Case(
    impl="tpu", dtype="bfloat16", w_dtype="bfloat16", operands="bfloat16"
  ),
  "tpu, bfloat16 operands": Case(impl="tpu", operands="bfloat16"),
}


def small_blocks(case: Case):
  """Block sizes of the case in place of those for real shapes."""
  tiles = lambda *_: tuning.Tiles(*case.tiles)
  return mock.patch.multiple(tuning, for_multiply=tiles, for_outer=tiles)


@functools.cache
def value_and_grads(case: Case):
  """Compiled (x, w, sizes, dout) -> (out, dx, dw)."""

  def function(x, w, sizes, dout):
    multiply = lambda x, w: grouped_matmul(
      x,
      w,
      sizes,
      transpose_w=case.transpose_w,
      operands=case.operands,
      impl=case.impl,
    )
    out, vjp = jax.vjp(multiply, x, w)
    return out, *vjp(dout)

  with small_blocks(case), mock.patch.object(xla, "CHUNK", case.chunk):
    return jax.jit(function).lower(*map(jnp.asarray, arrays(case))).compile()


def arrays(case: Case, sizes=None):
  """x, w, sizes, dout of a case, exact in its operands' dtype."""
  rng = np.random.default_rng(0)
  M, D, F, E = case.M, case.D, case.F, case.E
  w_dims = (E, F, D) if case.transpose_w else (E, D, F)
  x, w, dout = (
    jnp.asarray(rng.normal(size=dims), case.operands).astype(dtype)
    for dims, dtype in (
      ((M, D), case.dtype),
      (w_dims, case.w_dtype),
      ((M, F), case.dtype),
    )
  )
  if sizes is None:
    sizes = [0] * E
  return x, w, np.asarray(sizes, np.int32), dout


def check(case: Case, sizes: list[int]):
  x, w, sizes, dout = arrays(case, sizes)
  expected = oracle.value_and_grads(
    x, w, sizes, dout, transpose_w=case.transpose_w
  )
  # What stands in rows of no group must touch nothing.
  end = oracle.bounds(sizes, case.M)[-1]
  x, dout = x.at[end:].set(jnp.nan), dout.at[end:].set(jnp.nan)
  results = value_and_grads(case)(x, w, sizes, dout)
  dtypes = case.dtype, case.dtype, case.w_dtype
  for result, wanted, dtype in zip(results, expected, dtypes):
    assert result.dtype == dtype and result.shape == wanted.shape
    np.testing.assert_allclose(
      np.asarray(result, np.float64), wanted, **tolerance("matmul", dtype)
    )
  out, dx, dw = (np.asarray(a, np.float64) for a in results)
  assert not out[end:].any() and not dx[end:].any()
  # Exactly: an optimizer must see that an expert got nothing.
  assert not dw[np.diff(oracle.bounds(sizes, case.M)) == 0].any()


@st.composite
def ragged(draw, case: Case) -> list[int]:
  """Sizes with empty groups and rows of no group among the likely ones."""
  edges = draw(
    st.lists(st.integers(0, case.M), min_size=case.E, max_size=case.E)
  )
  return np.diff([0, *sorted(edges)]).tolist()


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=12)
def test_value_and_gradients_equal_float64(case, data):
  check(case, data.draw(ragged(case)))


@pytest.mark.parametrize("impl", sorted(HONOURS))
@pytest.mark.parametrize(
  "sizes",
  [
    [0, 0, 0, 0, 0],
    [53, 0, 0, 0, 0],
    [0, 0, 0, 0, 53],
    [0, 0, 1, 0, 0],
    [16, 16, 8, 8, 5],
    [1, 1, 1, 1, 1],
    [50, 10, 3, 0, 0],
    [60, 0, 5, 0, 0],
  ],
  ids=str,
)
def test_sizes_at_the_edge(impl, sizes):
  """Nothing, all in one group, borders at tiles' borders, more than M."""
  check(Case(impl=impl), sizes)


@pytest.mark.parametrize("impl", sorted(HONOURS))
def test_no_rows(impl):
  x, w = jnp.zeros((0, 8)), jnp.ones((3, 8, 16))
  sizes = jnp.zeros((3,), jnp.int32)
  multiply = lambda w: grouped_matmul(x, w, sizes, impl=impl)
  assert multiply(w).shape == (0, 16)
  assert not jax.grad(lambda w: multiply(w).sum())(w).any()


SIZES = np.array([7, 0, 16, 9], np.int32)
FULL = Case(impl="tpu", M=32, D=16, F=24, E=4, tiles=(8, 4, 8, 8))


def test_agrees_with_ragged_dot():
  x, w, _, dout = arrays(FULL)
  out, vjp = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, SIZES), x, w)
  ours = value_and_grads(FULL)(x, w, SIZES, dout)
  for result, wanted in zip(ours, (out, *vjp(dout))):
    np.testing.assert_allclose(result, wanted, **tolerance("matmul"))


def test_agrees_with_megablox():
  megablox = importlib.import_module(
    "jax.experimental.pallas.ops.tpu.megablox.gmm"
  )
  x, w, _, dout = arrays(FULL)
  settings = dict(tiling=(8, 8, 8), interpret=True)
  theirs = (
    megablox.gmm(x, w, SIZES, **settings),
    megablox.gmm(dout, w, SIZES, transpose_rhs=True, **settings),
    megablox.tgmm(x.T, dout, SIZES, **settings),
  )
  for result, wanted in zip(value_and_grads(FULL)(x, w, SIZES, dout), theirs):
    np.testing.assert_allclose(result, wanted, **tolerance("matmul"))


@pytest.mark.parametrize("impl", ["xla", "tpu", "gpu"])
def test_each_device_multiplies_its_own_experts(impl):
  """Inside `shard_map`: an axis over experts, whose rows stand with them."""
  case = Case(impl=impl, M=4 * 16, E=4 * 2, D=16, F=8, tiles=(8, 4, 8, 8))
  sizes = np.array([3, 9, 0, 0, 16, 0, 1, 2], np.int32)
  x, w, sizes, dout = arrays(case, sizes)
  mesh = jax.make_mesh(
    (4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,)
  )

  def local(x, w, sizes, dout):
    multiply = lambda x, w: grouped_matmul(x, w, sizes, impl=impl)
    out, vjp = jax.vjp(multiply, x, w)
    return out, *vjp(dout)

  with small_blocks(case), mock.patch.object(xla, "CHUNK", case.chunk):
    sharded = jax.shard_map(
      local,
      mesh=mesh,
      in_specs=P("expert"),
      out_specs=P("expert"),
      check_vma=False,
    )
    results = jax.jit(sharded)(x, w, sizes, dout)
  split = lambda array: np.split(np.asarray(array), 4)
  wanted = [
    oracle.value_and_grads(*part, transpose_w=False)
    for part in zip(*map(split, (x, w, sizes, dout)))
  ]
  for result, parts in zip(results, zip(*wanted)):
    np.testing.assert_allclose(
      result, np.concatenate(parts), **tolerance("matmul")
    )


def test_xla_form_holds_no_copy_of_the_rows_for_each_group():
  """As ragged-dot does on a CPU: with E times the work and the memory."""
  x, w, sizes, dout = arrays(Case(impl="xla"))

  def function(x, w, impl):
    multiply = lambda x, w: grouped_matmul(x, w, sizes, impl=impl)
    return jax.vjp(multiply, x, w)[1](dout)

  copies = lambda impl: {
    dims
    for dims in shapes(jax.make_jaxpr(lambda x, w: function(x, w, impl))(x, w))
    if len(dims) == 3 and 5 in dims and 53 in dims
  }
  assert copies("reference") and not copies("xla")


@pytest.mark.parametrize(
  ("platform", "primitive"),
  [("tpu", "pallas_call"), ("gpu", "ragged_dot_general"), ("cpu", "while")],
)
def test_auto_is_chosen_by_the_platform(platform, primitive):
  x, w, sizes, _ = arrays(Case(impl="auto"))
  traced = jax.make_jaxpr(
    lambda x, w: grouped_matmul(x, w, sizes, platform=platform)
  )(x, w)
  names = {equation.primitive.name for equation, _ in equations(traced)}
  others = {"pallas_call", "ragged_dot_general"} - {primitive}
  assert primitive in names and not names & others


def test_what_does_not_fit_is_refused():
  x, w, sizes, _ = arrays(Case(impl="xla"))
  with pytest.raises(ValueError, match=r"wanted w of shape \[5, 40, F\]"):
    grouped_matmul(x, w.swapaxes(1, 2), sizes)
  with pytest.raises(ValueError, match=r"wanted w of shape \[5, F, 40\]"):
    grouped_matmul(x, w, sizes, transpose_w=True)
  with pytest.raises(ValueError, match="one a group of w, got int32"):
    grouped_matmul(x, w, sizes[1:])
  with pytest.raises(ValueError, match="got float32"):
    grouped_matmul(x, w, sizes.astype(np.float32))
  with pytest.raises(ValueError, match="impl of grouped_matmul must be"):
    grouped_matmul(x, w, sizes, impl="megablox")
