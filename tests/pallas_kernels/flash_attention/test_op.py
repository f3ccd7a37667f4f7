"""Every implementation against float64, values and gradients."""

import dataclasses
import functools
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import xla
from pallas_kernels.flash_attention.op import flash_attention
from pallas_kernels.flash_attention.options import (
  Options,
  Rows,
  keep_mask,
  visible,
)
from tests.model.jaxprs import shapes
from tests.pallas_kernels.flash_attention import oracle
from tests.tolerances import tolerance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """What one compilation fixes; arrays, masks included, come afterwards."""

  impl: str
  chunk: int = 4
  max_unrolled: int = 8
  B: int = 2
  T: int = 11
  S: int = 11
  N: int = 6
  K: int = 2
  H: int = 5
  causal: bool = True
  window: int | None = None
  soft_cap: float | None = None
  dropout_rate: float = 0.0
  segments: bool = True
  positions: bool = False
  operands: str = "float32"


SCANNED = dict(impl="xla", chunk=3, max_unrolled=1)
CASES = {
  "reference": Case(impl="reference", soft_cap=2.0, dropout_rate=0.3),
  "reference, window": Case(impl="reference", window=4, K=6),
  "unrolled": Case(impl="xla"),
  "unrolled, dropout": Case(impl="xla", dropout_rate=0.3, T=5, S=5),
  "unrolled, window, soft-cap": Case(impl="xla", window=3, soft_cap=2.0, K=1),
  "unrolled, bidirectional window": Case(impl="xla", causal=False, window=4),
  "unrolled, one row a chunk": Case(impl="xla", chunk=1, T=3, S=3),
  "scanned": Case(**SCANNED, dropout_rate=0.3, window=5),
  "scanned, bidirectional, MHA": Case(**SCANNED, causal=False, K=6),
  "scanned, no segments": Case(**SCANNED, segments=False, soft_cap=2.0),
  "cache": Case(impl="xla", T=5, S=13, positions=True, window=6),
  "cache, one query": Case(impl="xla", T=1, S=7, positions=True),
  "one token": Case(impl="xla", T=1, S=1),
  "bfloat16 operands": Case(impl="xla", operands="bfloat16"),
}


def options_of(case: Case) -> Options:
  return Options(
    causal=case.causal,
    window=case.window,
    scale=case.H**-0.5,
    soft_cap=case.soft_cap,
    dropout_rate=case.dropout_rate,
    operands=case.operands,
  )


def attend(case: Case, q, k, v, rows: dict, keys):
  return flash_attention(
    q,
    k,
    v,
    causal=case.causal,
    window=case.window,
    soft_cap=case.soft_cap,
    dropout_rate=case.dropout_rate,
    dropout_keys_B=keys if case.dropout_rate else None,
    operands=case.operands,
    impl=case.impl,
    **rows,
  )


@functools.cache
def compiled(case: Case):
  """(q, k, v, g, rows, keys) -> (out, dq, dk, dv), of small chunks."""

  def run(q, k, v, g, rows, keys):
    out, pull = jax.vjp(lambda *x: attend(case, *x, rows, keys), q, k, v)
    return out, *pull(g)

  arrays = draw(case, 0)
  sizes = dict(CHUNK=case.chunk, MAX_UNROLLED=case.max_unrolled)
  with mock.patch.multiple(xla, **sizes):
    return jax.jit(run).lower(*arrays).compile()


def draw(case: Case, seed: int, scale: float = 1.0):
  """Random arguments; segments of any lengths, 0 (padding) among them."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype("float32")
  B, T, S, N, K, H = (getattr(case, name) for name in "BTSNKH")
  q, k, v = normal(B, T, N, H) * scale, normal(B, S, K, H), normal(B, S, K, H)
  rows = {}
  if case.positions:
    # A cache in any order of slots, some of them empty; queries may be
    # padding, and nothing may be visible to one.
    slots = [rng.permutation(S) for _ in range(B)]
    rows["q_positions"] = rng.integers(0, S, (B, T), dtype=np.int32)
    rows["k_positions"] = np.stack(slots).astype(np.int32)
    rows["q_segment_ids"] = rng.integers(0, 2, (B, T), dtype=np.int32)
    rows["k_segment_ids"] = rng.integers(0, 2, (B, S), dtype=np.int32)
  elif case.segments:
    cuts = rng.integers(0, 4, (B, T), dtype=np.int32)
    ids = np.sort(cuts, axis=1)  # Padding in front,
    if seed % 3 == 1:  # behind,
      ids = (ids + 1) % 4
    elif seed % 3 == 2:  # or nowhere.
      ids = ids + 1
    rows["q_segment_ids"] = rows["k_segment_ids"] = ids
  key_data = rng.integers(0, 2**32, (B, 2), dtype=np.uint32)
  keys = jax.random.wrap_key_data(key_data)
  return q, k, v, normal(B, T, N, H), rows, keys


draw_mask = jax.jit(keep_mask, static_argnums=(0, 3))


def expected(case: Case, q, k, v, g, rows, keys):
  """By the oracle, with the masks of `options.py`."""
  index = np.arange(case.T, dtype=np.int32)[None]
  queries = Rows(
    jnp.asarray(rows.get("q_positions", index)), rows.get("q_segment_ids")
  )
  seen = visible(
    options_of(case),
    queries,
    Rows(
      jnp.asarray(rows.get("k_positions", index)), rows.get("k_segment_ids")
    ),
  )
  seen = np.broadcast_to(seen, (case.B, case.T, case.S))
  keep = None
  if case.dropout_rate:
    shape = case.K, case.N // case.K, case.S
    index = jnp.arange(case.T)
    keep = draw_mask(options_of(case), keys, index, shape)
    keep = np.transpose(keep, (0, 2, 3, 1, 4)).reshape(
      case.B, case.N, case.T, case.S
    )
  return oracle.attention(
    q,
    k,
    v,
    g,
    seen,
    scale=case.H**-0.5,
    soft_cap=case.soft_cap,
    keep=keep,
    rate=case.dropout_rate,
  )


NAMES = ("out", "dq", "dk", "dv")


@pytest.mark.parametrize("name", CASES)
@hypothesis.settings(max_examples=12)
@hypothesis.given(seed=st.integers(0, 2**30))
def test_values_and_gradients(name, seed):
  case = CASES[name]
  arrays = draw(case, seed)
  for what, got, want in zip(
    NAMES, compiled(case)(*arrays), expected(case, *arrays), strict=True
  ):
    exact = what == "out" or case.operands == "float32"
    op = "attention" if exact else "gradient"
    np.testing.assert_allclose(
      got, want, err_msg=what, **tolerance(op, case.operands)
    )


def test_cases_reach_what_they_are_for():
  """Rows that see nothing, padding and several segments do occur."""
  empty = set()
  for name in ("unrolled", "cache"):
    for seed in range(12):
      out = expected(CASES[name], *draw(CASES[name], seed))[0]
      empty.add((out == 0).all(axis=(2, 3)).any())
  assert empty == {True, False}


@pytest.mark.parametrize("name", ["reference", "unrolled", "scanned", "cache"])
def test_rows_that_see_nothing_give_zero(name):
  case = CASES[name]
  q, k, v, g, rows, keys = draw(case, 1)
  blind = {
    path: np.zeros_like(x) if "segment" in path else x
    for path, x in rows.items()
  }
  for what, got in zip(
    NAMES, compiled(case)(q, k, v, g, blind, keys), strict=True
  ):
    np.testing.assert_array_equal(got, 0.0, err_msg=what)


@pytest.mark.parametrize("name", ["reference", "unrolled", "scanned", "cache"])
def test_nan_in_padding_touches_nothing(name):
  case = CASES[name]
  q, k, v, g, rows, keys = draw(case, 3)
  query, key = rows["q_segment_ids"] == 0, rows["k_segment_ids"] == 0
  assert query.any() and key.any()
  clean = compiled(case)(q, k, v, g, rows, keys)
  fill = lambda x, where: np.where(where[:, :, None, None], np.nan, x).astype(
    "float32"
  )
  poisoned = compiled(case)(
    fill(q, query), fill(k, key), fill(v, key), fill(g, query), rows, keys
  )
  for what, got, want in zip(NAMES, poisoned, clean, strict=True):
    np.testing.assert_array_equal(got, want, err_msg=what)


@pytest.mark.parametrize("name", ["reference, window", "unrolled", "cache"])
def test_large_logits(name):
  # Scores reach 1000: exp would overflow at 89.
  case = CASES[name]
  q, k, v, g, rows, keys = draw(case, 2, scale=300.0)
  assert (
    np.abs(np.einsum("bthd,bshd->bts", q[..., :1, :], k[..., :1, :])).max()
    > 1000
  )
  for what, got, want in zip(
    NAMES,
    compiled(case)(q, k, v, g, rows, keys),
    expected(case, q, k, v, g, rows, keys),
    strict=True,
  ):
    np.testing.assert_allclose(
      got, want, err_msg=what, **tolerance("attention_large_logits")
    )


@pytest.mark.parametrize("window", [None, 4])
def test_agrees_with_jax(window):
  case = Case(impl="xla", window=window, segments=False)
  q, k, v, _, _, _ = draw(case, 0)
  theirs = jax.nn.dot_product_attention(
    q,
    k,
    v,
    is_causal=True,
    # Theirs counts the keys before the query, without itself.
    local_window_size=None if window is None else (window - 1, 0),
  )
  np.testing.assert_allclose(
    attend(case, q, k, v, {}, None), theirs, **tolerance("attention")
  )


def test_rows_of_a_batch_are_independent():
  case = CASES["unrolled"]
  q, k, v, g, rows, keys = draw(case, 5)
  swap = lambda x: x[::-1]
  straight = compiled(case)(q, k, v, g, rows, keys)
  swapped = compiled(case)(*jax.tree.map(swap, (q, k, v, g, rows, keys)))
  for got, want in zip(swapped, straight, strict=True):
    np.testing.assert_allclose(got[::-1], want, **tolerance("elementwise"))


def test_memory_is_linear_in_the_length():
  """No value of the traced gradient holds all T x S scores of a head."""

  def largest(T: int) -> int:
    x = jax.ShapeDtypeStruct((1, T, 1, 2), jnp.float32)
    loss = lambda q, k, v: flash_attention(q, k, v).sum()
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x)
    return max(np.prod(shape) for shape in shapes(jaxpr))

  assert largest(2048) == xla.CHUNK * 2048
  assert largest(4096) == xla.CHUNK * 4096


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(impl="cudnn"), "impl must be 'auto' or one of .*'cudnn'"),
    (dict(window=0), "window must be at least 1, got 0"),
    (dict(q_positions=np.zeros((2, 11), np.int32)), "k_positions both"),
    (dict(k_segment_ids=np.ones((2, 11), np.int32)), "k_segment_ids both"),
  ],
  ids=str,
)
def test_refuses(changes, message):
  q, k, v, _, _, _ = draw(CASES["unrolled"], 0)
  with pytest.raises(ValueError, match=message):
    flash_attention(q, k, v, **changes)


def test_refuses_shapes():
  q, k, v, _, _, _ = draw(CASES["unrolled"], 0)
  with pytest.raises(ValueError, match="Set q_positions and k_positions"):
    flash_attention(q[:, :3], k, v)
  with pytest.raises(ValueError, match="wanted k and v of shape"):
    flash_attention(q, k, v[:, :3])
  with pytest.raises(ValueError, match="5 query heads are not a multiple of 2"):
    flash_attention(q[:, :, :5], k, v)
