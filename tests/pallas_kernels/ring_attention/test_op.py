"""Attention over several devices equals attention on one."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.flash_attention import tuning, xla
from pallas_kernels.flash_attention.dropout import row_words
from pallas_kernels.flash_attention.op import flash_attention
from pallas_kernels.ring_attention.op import ring_attention
from pallas_kernels.ring_attention.order import permutation, rows_of
from pallas_kernels.ring_attention.ulysses import ulysses_attention
from tests.tolerances import tolerance

B, N, K, H = 2, 4, 2, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A call, and the ring it runs on."""

  impl: str = "xla"
  form: str = "ring"
  order: str = "contiguous"
  positions: bool = False  # Rows say where they stand; the op knows no order.
  devices: int = 4
  kv_heads: int = K
  length: int = 48
  causal: bool = True
  window: int | tuple[int | None, int | None] | None = None
  segments: bool = True
  soft_cap: float | None = None
  sinks: bool = False
  dropout_rate: float = 0.0


TPU = dict(impl="tpu", devices=2, length=512)
CASES = {
  "ring": Case(),
  "ring, zigzag, all masks": Case(
    order="zigzag", window=17, soft_cap=2.0, sinks=True, dropout_rate=0.3
  ),
  "ring, bidirectional": Case(causal=False, window=(5, 20), segments=False),
  "ring of one": Case(devices=1),
  "ring of eight, zigzag": Case(devices=8, order="zigzag", segments=False),
  "all_gather": Case(form="all_gather", sinks=True),
  "all_gather, zigzag, all masks": Case(
    form="all_gather", order="zigzag", window=9, dropout_rate=0.2
  ),
  "ring, positions, all masks": Case(
    order="zigzag", positions=True, window=17, sinks=True, dropout_rate=0.3
  ),
  "all_gather, positions": Case(
    form="all_gather", order="zigzag", positions=True, window=(None, 3)
  ),
  "ulysses": Case(form="ulysses", positions=True, devices=2),
  "ulysses, zigzag, all masks": Case(
    form="ulysses",
    order="zigzag",
    positions=True,
    devices=2,
    window=9,
    soft_cap=2.0,
    sinks=True,
    dropout_rate=0.2,
  ),
  "ulysses, fewer key heads": Case(form="ulysses", positions=True, devices=4),
  "ulysses, one key head": Case(
    form="ulysses", positions=True, kv_heads=1, segments=False, causal=False
  ),
  "tpu, ulysses": Case(**TPU, form="ulysses", positions=True, window=100),
  "tpu, ring, positions": Case(**TPU, order="zigzag", positions=True),
  "tpu, ring, zigzag": Case(**TPU, order="zigzag", sinks=True),
  "tpu, ring, window": Case(**TPU, window=100, dropout_rate=0.2),
  "tpu, all_gather, zigzag": Case(**TPU, form="all_gather", order="zigzag"),
}


def arguments(case: Case):
  """q, k, v, sinks, cotangents, rows; some rows are padding."""
  rng = np.random.default_rng(0)
  T = case.length
  normal = lambda *shape: rng.normal(size=shape).astype("float32")
  q, k, v, g = (
    normal(B, T, heads, H) for heads in (N, case.kv_heads, case.kv_heads, N)
  )
  rows = {}
  if case.segments:
    ids = np.sort(rng.integers(1, 5, (B, T), dtype=np.int32), axis=1)
    rows["segment_ids"] = np.where(np.arange(T) < T - 5, ids, 0)
    rows["segment_ids"] = rows["segment_ids"].astype(np.int32)
  if case.dropout_rate:
    keys = jax.random.split(jax.random.key(0), B)
    rows["dropout_words_2BNT"] = np.asarray(row_words(keys, jnp.arange(T), N))
  return q, k, v, normal(N), g, normal(B, T, N), rows


def settings(case: Case) -> dict:
  return dict(
    causal=case.causal,
    window=case.window,
    soft_cap=case.soft_cap,
    dropout_rate=case.dropout_rate,
    return_lse=True,
    impl=case.impl,
  )


def outputs(attend, q, k, v, sinks, g, g_lse, rows):
  """Values and gradients by all that has some."""
  (out, lse), pull = jax.vjp(lambda *x: attend(*x, rows), q, k, v, sinks)
  seen = lse > -1e29  # The logsumexp of no key has no gradient.
  dq, dk, dv, dsinks = pull((g, jnp.where(seen, g_lse, 0.0)))
  return dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv, dsinks=dsinks)


def on_one_device(case: Case):
  def attend(q, k, v, sinks, rows):
    rows = dict(rows)
    ids = rows.pop("segment_ids", None)
    return flash_attention(
      q,
      k,
      v,
      q_segment_ids=ids,
      k_segment_ids=ids,
      sinks_N=sinks if case.sinks else None,
      **settings(case) | dict(impl="reference"),
      **rows,
    )

  return jax.jit(functools.partial(outputs, attend))(*arguments(case))


# Which dim of each argument holds rows.
ROWS = {"segment_ids": 1, "dropout_words_2BNT": 3, "positions": 1}


def on_a_ring(case: Case):
  axes = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((case.devices,), ("context",), axis_types=axes)
  order = permutation(case.order, case.devices, case.length)
  split = P(None, "context")
  row_specs = {
    "segment_ids": split,
    "positions": split,
    "dropout_words_2BNT": P(None, None, None, "context"),
  }
  if case.form == "ulysses":
    op = ulysses_attention
  else:
    known = "contiguous" if case.positions else case.order
    op = functools.partial(ring_attention, form=case.form, order=known)

  def attend(q, k, v, sinks, rows):
    def local(q, k, v, sinks, rows):
      return op(
        q,
        k,
        v,
        axis_name="context",
        sinks_N=sinks if case.sinks else None,
        **settings(case),
        **rows,
      )

    specs = {name: row_specs[name] for name in rows}
    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(split, split, split, P(), specs),
      out_specs=split,
      check_vma=False,
    )(q, k, v, sinks, rows)

  q, k, v, sinks, g, g_lse, rows = arguments(case)
  if case.positions:
    counted = np.arange(case.length, dtype=np.int32)
    rows["positions"] = np.broadcast_to(counted, (B, case.length))
  lay = lambda x, axis=1: np.take(x, order, axis=axis)
  rows = {name: lay(x, ROWS[name]) for name, x in rows.items()}
  blocks = dict(block_q=128, block_k=128, step=128, chunk_k=256)
  with (
    mock.patch.object(xla, "CHUNK", 8),
    mock.patch.object(tuning, "find", lambda *_: blocks),
  ):
    found = jax.jit(functools.partial(outputs, attend))(
      lay(q), lay(k), lay(v), sinks, lay(g), lay(g_lse), rows
    )
  back = np.argsort(order)
  return {
    name: x if name == "dsinks" else np.take(np.asarray(x), back, axis=1)
    for name, x in found.items()
  }


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name):
  case = CASES[name]
  want, got = on_one_device(case), on_a_ring(case)
  for what, value in want.items():
    np.testing.assert_allclose(
      got[what], value, err_msg=what, **tolerance("attention")
    )


def test_rows_of_each_device():
  held = lambda *x: np.asarray(rows_of(*x)).tolist()
  assert held("contiguous", 4, 2, 3) == [6, 7, 8]
  assert held("zigzag", 4, 0, 4) == [0, 1, 14, 15]
  assert held("zigzag", 4, 3, 4) == [6, 7, 8, 9]
  for order in ("contiguous", "zigzag"):
    rows = permutation(order, 4, 24)
    assert sorted(rows) == list(range(24))


def test_zigzag_balances_a_causal_mask():
  """Keys seen by the queries of each device, in all."""
  work = lambda order: {
    int((np.asarray(rows_of(order, 4, d, 8)) + 1).sum()) for d in range(4)
  }
  assert len(work("zigzag")) == 1
  assert len(work("contiguous")) == 4


@pytest.mark.parametrize("form", ["ring", "all_gather"])
def test_keys_travel_as_often_as_they_must(form):
  """Collectives in the program that XLA compiles, loops counted."""
  case = Case(form=form, segments=False, devices=4)
  axes = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((4,), ("context",), axis_types=axes)
  split = P(None, "context")
  attend = functools.partial(
    ring_attention, axis_name="context", form=case.form, impl="xla"
  )
  run = jax.shard_map(
    attend, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
  )
  loss = lambda q, k, v: run(q, k, v).sum()
  q, k, v, *_ = arguments(case)
  jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v))
  count = {
    name: jaxpr.count(f"{name}[")
    for name in ("ppermute", "all_gather", "reduce_scatter")
  }
  if form == "ring":
    # In loops of three: keys, values, positions, and back with two
    # gradients, which at last go home.
    assert count == {
      "ppermute": 3 + 5 + 2,
      "all_gather": 0,
      "reduce_scatter": 0,
    }
    assert jaxpr.count("length=3") == 2
  else:
    assert count == {"ppermute": 0, "all_gather": 3 + 3, "reduce_scatter": 2}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(form="star"), "form must be one of .*'star'"),
    (dict(order="spiral"), "order must be one of .*'spiral'"),
    (dict(order="zigzag"), "needs an even number of rows a device, got 3"),
    (
      dict(order="zigzag", positions=jnp.zeros((1, 3), jnp.int32)),
      "give positions or order='zigzag', not both",
    ),
    (dict(impl="reference"), "impl of ring_attention must be"),
  ],
  ids=str,
)
def test_refuses(changes, message):
  x = jnp.zeros((1, 3, 2, 4))
  attend = functools.partial(ring_attention, axis_name="context", **changes)
  mesh = jax.make_mesh((1,), ("context",))
  with pytest.raises(ValueError, match=message):
    jax.shard_map(
      attend, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )(x, x, x)


def test_ulysses_refuses_heads_that_do_not_divide():
  positions = jnp.zeros((1, 3), jnp.int32)
  mesh = jax.make_mesh((4,), ("context",))
  attend = functools.partial(ulysses_attention, axis_name="context")
  for q_heads, kv_heads in [(6, 2), (8, 3)]:
    run = jax.shard_map(
      lambda q, k: attend(q, k, k, positions=positions),
      mesh=mesh,
      in_specs=P(),
      out_specs=P(),
      check_vma=False,
    )
    heads = f"{q_heads} query heads and {kv_heads} key heads"
    with pytest.raises(ValueError, match=f"{heads}; change mesh.context"):
      run(jnp.zeros((1, 3, q_heads, 4)), jnp.zeros((1, 3, kv_heads, 4)))


def test_refuses_lengths():
  with pytest.raises(ValueError, match="10 does not divide by 4 devices"):
    permutation("contiguous", 4, 10)
