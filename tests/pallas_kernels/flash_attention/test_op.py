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

from pallas_kernels.flash_attention import tuning, xla
from pallas_kernels.flash_attention.dropout import row_words
from pallas_kernels.flash_attention.op import flash_attention
from tests.model.jaxprs import shapes
from tests.pallas_kernels.flash_attention import oracle
from tests.tolerances import tolerance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """What one compilation fixes; arrays, masks included, come afterwards.

  Attributes:
    impl: what runs.
    chunk: queries of a chunk, of "xla".
    max_unrolled: chunks, of "xla".
    blocks: (block_q, block_k, step, chunk_k), of "tpu".
  """

  impl: str
  chunk: int = 4
  max_unrolled: int = 8
  blocks: tuple[int, int, int, int] = (128, 128, 128, 256)
  B: int = 2
  T: int = 11
  S: int = 11
  N: int = 6
  K: int = 2
  H: int = 5
  causal: bool = True
  window: int | tuple[int | None, int | None] | None = None
  q_offset: int | None = None
  soft_cap: float | None = None
  sinks: bool = False
  dropout_rate: float = 0.0
  segments: bool = True
  positions: bool = False
  operands: str = "float32"

  @property
  def sides(self) -> tuple[int | None, int | None]:
    """(left, right) of the window, causality included."""
    if isinstance(self.window, tuple):
      left, right = self.window
    elif self.window is None:
      left = right = None
    else:
      left = right = self.window - 1
    return left, 0 if self.causal else right


SCANNED = dict(impl="xla", chunk=3, max_unrolled=1)
TPU = dict(impl="tpu", T=300, S=300, N=2, K=1, H=16)
CASES = {
  "reference": Case(impl="reference", soft_cap=2.0, dropout_rate=0.3),
  "reference, window": Case(impl="reference", window=4, K=6, sinks=True),
  "unrolled": Case(impl="xla"),
  "unrolled, dropout": Case(impl="xla", dropout_rate=0.3, T=5, S=5),
  "unrolled, window, soft-cap": Case(impl="xla", window=3, soft_cap=2.0, K=1),
  "unrolled, bidirectional window": Case(impl="xla", causal=False, window=4),
  "unrolled, lopsided window": Case(impl="xla", causal=False, window=(2, 5)),
  "unrolled, one row a chunk": Case(impl="xla", chunk=1, T=3, S=3),
  "unrolled, offset": Case(
    impl="xla", T=6, S=11, q_offset=3, window=4, segments=False, sinks=True
  ),
  "unrolled, before all keys": Case(
    impl="xla", T=6, S=5, q_offset=-4, segments=False
  ),
  "scanned": Case(**SCANNED, dropout_rate=0.3, window=5),
  "scanned, bidirectional, MHA": Case(**SCANNED, causal=False, K=6),
  "scanned, no segments": Case(**SCANNED, segments=False, soft_cap=2.0),
  "cache": Case(impl="xla", T=5, S=13, positions=True, window=6),
  "cache, one query": Case(impl="xla", T=1, S=7, positions=True),
  "one token": Case(impl="xla", T=1, S=1, sinks=True),
  "bfloat16 operands": Case(impl="xla", operands="bfloat16"),
  "tpu": Case(**TPU),
  "tpu, no segments": Case(**TPU, segments=False, blocks=(256, 256, 128, 512)),
  "tpu, window, soft-cap, sinks": Case(
    **TPU, window=70, soft_cap=2.0, sinks=True, blocks=(128, 256, 128, 256)
  ),
  "tpu, bidirectional, dropout": Case(**TPU, causal=False, dropout_rate=0.3),
  "tpu, bidirectional window, dropout": Case(
    **TPU, causal=False, window=(40, 150), dropout_rate=0.2, segments=False
  ),
  "tpu, cache": Case(**TPU | dict(T=40), positions=True, window=90),
  "tpu, one query": Case(
    **TPU | dict(T=1, N=4, K=2), q_offset=200, segments=False
  ),
  "tpu, prefill by chunks": Case(
    **TPU | dict(T=130), q_offset=128, segments=False, window=150
  ),
  "tpu, one token": Case(**TPU | dict(T=1, S=1), segments=False),
  "tpu, bfloat16 operands": Case(**TPU, operands="bfloat16"),
}
TPU_CASES = [name for name, case in CASES.items() if case.impl == "tpu"]


def attend(case: Case, q, k, v, sinks, rows: dict, keys):
  words = None
  if case.dropout_rate:
    words = row_words(keys, jnp.arange(case.T), case.N)
  return flash_attention(
    q,
    k,
    v,
    causal=case.causal,
    window=case.window,
    q_offset=case.q_offset,
    soft_cap=case.soft_cap,
    sinks_N=sinks if case.sinks else None,
    dropout_rate=case.dropout_rate,
    dropout_words_2BNT=words,
    return_lse=True,
    operands=case.operands,
    impl=case.impl,
    **rows,
  )


@functools.cache
def compiled(case: Case):
  """(q, k, v, sinks, g, g_lse, rows, keys) -> dict, of small chunks."""

  def run(q, k, v, sinks, g, g_lse, rows, keys):
    attend_ = lambda *x: attend(case, *x, rows, keys)
    (out, lse), pull = jax.vjp(attend_, q, k, v, sinks)
    dq, dk, dv, dsinks = pull((g, g_lse))
    found = dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv)
    return found | dict(dsinks=dsinks) if case.sinks else found

  names = "block_q", "block_k", "step", "chunk_k"
  blocks = dict(zip(names, case.blocks, strict=True))
  sizes = dict(CHUNK=case.chunk, MAX_UNROLLED=case.max_unrolled)
  with (
    mock.patch.multiple(xla, **sizes),
    mock.patch.object(tuning, "find", lambda *_: blocks),
  ):
    return jax.jit(run).lower(*draw(case, 0)).compile()


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
  g, g_lse, sinks = normal(B, T, N, H), normal(B, T, N), normal(N)
  if rows:
    # A query in padding has no logsumexp.
    g_lse = g_lse * (rows["q_segment_ids"] != 0)[..., None]
  return q, k, v, sinks, g, g_lse, rows, keys


draw_words = jax.jit(row_words, static_argnums=2)


def seen_of(case: Case, rows: dict):
  """bool [B, T, S]."""
  offset = case.q_offset or 0
  found = oracle.seen(case.T, case.S, *case.sides, offset=offset, **rows)
  return np.broadcast_to(found, (case.B, case.T, case.S))


def expected(case: Case, q, k, v, sinks, g, g_lse, rows, keys):
  """By the oracle."""
  keep = None
  if case.dropout_rate:
    words = draw_words(keys, jnp.arange(case.T), case.N)
    keep = oracle.keep(words, case.S, case.dropout_rate)
  found = oracle.attention(
    q,
    k,
    v,
    g,
    seen_of(case, rows),
    scale=case.H**-0.5,
    soft_cap=case.soft_cap,
    sinks=sinks if case.sinks else None,
    g_lse=g_lse,
    keep=keep,
    rate=case.dropout_rate,
  )
  if rows:
    padding = rows["q_segment_ids"] == 0
    found["out"][padding] = 0.0
    found["lse"][padding] = -np.inf
  return found


def check(case: Case, got: dict, want: dict, op: str | None = None):
  """All that is in both, name by name."""
  assert got.keys() == want.keys()
  for what, value in want.items():
    exact = what in ("out", "lse") or case.operands == "float32"
    rule = op or ("attention" if exact else "gradient")
    blind = np.isneginf(value)
    np.testing.assert_array_equal(
      np.asarray(got[what])[blind], np.float32(-1e30)
    )
    np.testing.assert_allclose(
      np.where(blind, 0.0, got[what]),
      np.where(blind, 0.0, value),
      err_msg=what,
      **tolerance(rule, case.operands),
    )


@pytest.mark.parametrize("name", [n for n in CASES if n not in TPU_CASES])
@hypothesis.settings(max_examples=12)
@hypothesis.given(seed=st.integers(0, 2**30))
def test_values_and_gradients(name, seed):
  case = CASES[name]
  arrays = draw(case, seed)
  check(case, compiled(case)(*arrays), expected(case, *arrays))


@pytest.mark.parametrize("name", TPU_CASES)
@hypothesis.settings(max_examples=3)
@hypothesis.given(seed=st.integers(0, 2**30))
def test_values_and_gradients_of_the_kernel(name, seed):
  case = CASES[name]
  arrays = draw(case, seed)
  check(case, compiled(case)(*arrays), expected(case, *arrays))


def test_cases_reach_what_they_are_for():
  """Rows that see nothing, padding and several segments do occur."""
  for names in (("unrolled", "cache"), ("tpu", "tpu, cache")):
    empty = set()
    for name in names:
      case = CASES[name]
      for seed in range(12):
        rows = draw(case, seed)[6]
        empty.add(not seen_of(case, rows).any(axis=-1).all())
    assert empty == {True, False}


WITH_ROWS = ["reference", "unrolled", "scanned", "cache", "tpu", "tpu, cache"]


@pytest.mark.parametrize("name", WITH_ROWS)
def test_rows_that_see_nothing_give_zero(name):
  case = CASES[name]
  *arrays, g_lse, rows, keys = draw(case, 1)
  blind = {
    path: np.zeros_like(x) if "segment" in path else x
    for path, x in rows.items()
  }
  got = compiled(case)(*arrays, g_lse, blind, keys)
  np.testing.assert_array_equal(got.pop("lse"), np.float32(-1e30))
  for what, value in got.items():
    np.testing.assert_array_equal(value, 0.0, err_msg=what)


@pytest.mark.parametrize("name", WITH_ROWS)
def test_nan_in_padding_touches_nothing(name):
  case = CASES[name]
  q, k, v, sinks, g, g_lse, rows, keys = draw(case, 3)
  query, key = rows["q_segment_ids"] == 0, rows["k_segment_ids"] == 0
  assert query.any() and key.any()
  clean = compiled(case)(q, k, v, sinks, g, g_lse, rows, keys)

  def fill(x, where):
    where = where.reshape(*where.shape, *(1,) * (x.ndim - 2))
    return np.where(where, np.nan, x).astype("float32")

  poisoned = compiled(case)(
    fill(q, query),
    fill(k, key),
    fill(v, key),
    sinks,
    fill(g, query),
    fill(g_lse, query),
    rows,
    keys,
  )
  for what, want in clean.items():
    np.testing.assert_array_equal(poisoned[what], want, err_msg=what)


@pytest.mark.parametrize(
  "name", ["reference, window", "unrolled", "cache", "tpu"]
)
def test_large_logits(name):
  # Scores reach 1000: exp would overflow at 89.
  case = CASES[name]
  # Gradients grow with q, and longer rows with what is rounded.
  arrays = draw(case, 2, scale=100.0 if case.impl == "tpu" else 300.0)
  q, k = arrays[:2]
  scores = np.einsum("bthd,bshd->bts", q[..., :1, :], k[..., :1, :])
  assert np.abs(scores).max() > 1000
  got, want = compiled(case)(*arrays), expected(case, *arrays)
  check(case, got, want, "attention_large_logits")


# Who sees whom among four tiles of 128 rows each: first keys that are seen.
EMPTY_TILES = {
  "causal": (dict(), [0, 0, 0, 0]),
  "window": (dict(window=100), [0, 0, 1, 2]),
  "segments": (dict(), [0, 0, 2, 2]),
}


@pytest.mark.parametrize("name", EMPTY_TILES)
def test_tiles_that_the_mask_empties_are_skipped(name):
  """A product with NaN is NaN, whatever its weight."""
  settings, firsts = EMPTY_TILES[name]
  case = Case(**TPU | dict(T=512, S=512, B=1), segments=False)
  q, k, v, _, g, *_ = draw(case, 0)
  ids = np.repeat([[1, 1, 2, 2]], 128, axis=1).astype(np.int32)
  rows = dict(q_segment_ids=ids, k_segment_ids=ids)
  rows = rows if name == "segments" else {}
  blocks = dict(block_q=128, block_k=128, step=128, chunk_k=512)

  @jax.jit
  def run(q, k, v, g):
    attend = lambda *x: flash_attention(*x, impl="tpu", **settings, **rows)
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(g)

  tile = lambda number: slice(128 * number, 128 * (number + 1))
  with mock.patch.object(tuning, "find", lambda *_: blocks):
    clean = run(q, k, v, g)
    for query in range(4):
      seen = range(firsts[query], query + 1)
      for key in set(range(4)) - set(seen):
        poisoned = v.copy()
        poisoned[:, tile(key)] = np.nan
        out = run(q, k, poisoned, g)[0][:, tile(query)]
        np.testing.assert_array_equal(out, clean[0][:, tile(query)])
      poisoned = g.copy()
      poisoned[:, tile(query)] = np.nan
      _, _, dk, dv = run(q, k, v, poisoned)
      for key in set(range(4)) - set(seen):
        np.testing.assert_array_equal(dk[:, tile(key)], clean[2][:, tile(key)])
        np.testing.assert_array_equal(dv[:, tile(key)], clean[3][:, tile(key)])
      for key in seen:
        assert np.isnan(dv[:, tile(key)]).any()


@pytest.mark.parametrize("impl", ["xla", "tpu"])
@pytest.mark.parametrize("window", [None, 4])
def test_agrees_with_jax(window, impl):
  case = Case(impl=impl, window=window, segments=False)
  q, k, v, sinks, *_ = draw(case, 0)
  theirs = jax.nn.dot_product_attention(
    q,
    k,
    v,
    is_causal=True,
    # Theirs counts the keys before the query, without itself.
    local_window_size=None if window is None else (window - 1, 0),
  )
  got, _ = attend(case, q, k, v, sinks, {}, None)
  np.testing.assert_allclose(got, theirs, **tolerance("attention"))


@pytest.mark.parametrize("name", ["unrolled", "tpu"])
def test_rows_of_a_batch_are_independent(name):
  case = CASES[name]
  *arrays, sinks, g, g_lse, rows, keys = draw(case, 5)
  straight = compiled(case)(*arrays, sinks, g, g_lse, rows, keys)
  arrays, (g, g_lse, rows, keys) = jax.tree.map(
    lambda x: x[::-1], (arrays, (g, g_lse, rows, keys))
  )
  swapped = compiled(case)(*arrays, sinks, g, g_lse, rows, keys)
  for what, want in straight.items():
    np.testing.assert_allclose(
      swapped[what][::-1], want, err_msg=what, **tolerance("elementwise")
    )


def test_an_offset_may_be_an_array():
  case = CASES["unrolled, offset"]
  q, k, v, *_ = draw(case, 0)
  for impl in ("xla", "tpu"):
    run = functools.partial(flash_attention, q, k, v, window=4, impl=impl)
    want = run(q_offset=3)
    for offset in (jnp.int32(3), jnp.asarray([3, 3])):
      np.testing.assert_allclose(
        run(q_offset=offset), want, **tolerance("elementwise")
      )
    other = run(q_offset=jnp.asarray([3, 5]))
    np.testing.assert_allclose(other[0], want[0], **tolerance("elementwise"))
    assert np.abs(other[1] - want[1]).max() > 0.1


def test_all_implementations_drop_the_same():
  case = Case(impl="auto", dropout_rate=0.4, T=130, S=130, segments=False)
  q, k, v, sinks, _, _, _, keys = draw(case, 0)
  reference, xla_, tpu = (
    attend(dataclasses.replace(case, impl=impl), q, k, v, sinks, {}, keys)[0]
    for impl in ("reference", "xla", "tpu")
  )
  np.testing.assert_allclose(xla_, reference, **tolerance("attention"))
  np.testing.assert_allclose(tpu, reference, **tolerance("attention"))


def test_memory_of_long_rows():
  """Gradients at T = 8192: at most 256 MB above the inputs."""
  x = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.float32)
  loss = lambda q, k, v: flash_attention(q, k, v, impl="xla").sum()
  grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  memory = grad.lower(x, x, x).compile().memory_analysis()
  assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 256e6


@pytest.mark.parametrize("impl", ["xla", "tpu"])
def test_memory_is_linear_in_the_length(impl):
  """No value of the traced gradient holds all T x S scores of a head."""

  def largest(T: int) -> int:
    x = jax.ShapeDtypeStruct((1, T, 1, 2), jnp.float32)
    loss = lambda q, k, v: flash_attention(q, k, v, impl=impl).sum()
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, x, x)
    return max(np.prod(shape) for shape in shapes(jaxpr))

  if impl == "xla":
    assert largest(2048) == xla.CHUNK * 2048
    assert largest(4096) == xla.CHUNK * 4096
  else:  # Tiles of a fixed size, and rows.
    assert largest(8192) <= max(largest(2048), 8192 * 128)
