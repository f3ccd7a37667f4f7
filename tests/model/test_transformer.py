"""The decoder: who sees whom, caches, packing, rematerialisation, depth."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import Rope
from model.dropout import row_keys
from model.execution import Execution
from model.kv_cache import KVCache
from model.losses import cross_entropy
from model.precision import POLICIES
from tests.model.jaxprs import equations
from tests.model.tiny import CONFIG, make, tokens
from tests.tolerances import tolerance

# L is no multiple of the pattern; local layers turn at another rate.
PATTERN = dict(
  layer_pattern=("local", "global"), window=3, rope_local=Rope(theta=7.0)
)
close = functools.partial(np.testing.assert_allclose, **tolerance("attention"))


@functools.cache
def forward(**changes):
  """(model, jitted function of tokens and the like)."""
  model = make(**changes)
  return model, jax.jit(lambda batch, **rows: model(batch, **rows))


def run(batch, changes=(), **rows):
  return np.asarray(forward(**dict(changes))[1](batch, **rows))


def moved(base, other) -> list[int]:
  """Positions of the first row whose hidden states differ."""
  difference = np.abs(base - other)[0].max(axis=-1)
  return np.flatnonzero(difference > 1e-6).tolist()


def test_a_token_moves_only_what_comes_after_it():
  batch = tokens(1, 9)
  base = run(batch)
  for t in (0, 4, 8):
    other = batch.copy()
    other[0, t] = (other[0, t] + 1) % CONFIG.vocab_size
    assert moved(base, run(other)) == list(range(t, 9))


def test_without_causality_a_token_moves_all():
  changes = (("causal", False),)
  batch = tokens(1, 9)
  other = batch.copy()
  other[0, 4] = (other[0, 4] + 1) % CONFIG.vocab_size
  assert moved(run(batch, changes), run(other, changes)) == list(range(9))


def test_a_window_reaches_as_far_as_its_layers_add_up():
  """Three layers of window 3 see 3 + 2 + 2 positions, the own one included."""
  changes = (("layer_pattern", ("local",)), ("window", 3))
  batch = tokens(1, 12)
  other = batch.copy()
  other[0, 2] = (other[0, 2] + 1) % CONFIG.vocab_size
  assert moved(run(batch, changes), run(other, changes)) == list(range(2, 9))


def test_layers_of_a_pattern_are_the_kinds_they_are_called():
  """Scanned with traced kinds equals a Python loop with static ones."""
  batch = tokens(2, 9)
  changes = tuple(PATTERN.items())
  model, _ = forward(**PATTERN)
  assert model.config.layer_kinds == ("local", "global", "local")
  base = run(batch, changes)
  close(base, jax.jit(model.unstacked())(batch))
  # The order counts, and so does each setting.
  for other in (
    {"layer_pattern": ("global", "local")},
    {"window": 4},
    {"rope_local": None},
  ):
    assert np.abs(base - run(batch, (PATTERN | other).items())).max() > 1e-3


@pytest.mark.parametrize("changes", [{}, PATTERN], ids=["global", "pattern"])
def test_packing_equals_rows_of_their_own(changes):
  lengths = (4, 7, 2)
  parts = [tokens(1, n, seed=n)[0] for n in lengths]
  batch = np.concatenate([*parts, np.array([5, 9], np.int32)])[None]
  ids = np.repeat([1, 2, 3, 0], [*lengths, 2])[None].astype(np.int32)
  positions = np.concatenate([*map(np.arange, lengths), [0, 0]])[None]
  packed = run(
    batch,
    changes.items(),
    segment_ids=ids,
    positions=positions.astype(np.int32),
  )
  assert np.isfinite(packed).all()
  # Alone in rows that are filled up with padding: one shape to compile.
  for segment, part in enumerate(parts, start=1):
    alone = np.zeros_like(batch)
    alone[0, : len(part)] = part
    rows = np.zeros_like(ids)
    rows[0, : len(part)] = 1
    want = run(
      alone,
      changes.items(),
      segment_ids=rows,
      positions=np.arange(15, dtype=np.int32)[None],
    )
    close(packed[ids == segment], want[0, : len(part)])


def test_the_numbers_of_segments_do_not_matter():
  batch = tokens(1, 6)
  ids = np.array([[1, 1, 2, 2, 2, 3]], np.int32)
  renamed = np.array([[7, 7, 1, 1, 1, 2]], np.int32)
  np.testing.assert_array_equal(
    run(batch, segment_ids=ids), run(batch, segment_ids=renamed)
  )
  assert moved(run(batch, segment_ids=ids), run(batch)) == [2, 3, 4, 5]


def test_positions_count():
  batch = tokens(1, 6)
  count = np.arange(6, dtype=np.int32)[None]
  np.testing.assert_array_equal(run(batch, positions=count), run(batch))
  close(run(batch, positions=count + 9), run(batch))  # Relative.
  assert moved(run(batch, positions=2 * count), run(batch)) == [1, 2, 3, 4, 5]
  none = (("rope", None),)
  np.testing.assert_array_equal(
    run(batch, none, positions=2 * count), run(batch, none)
  )


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("changes", [{}, PATTERN], ids=["global", "pattern"])
def test_decoding_with_a_cache_equals_the_full_forward(changes, stacked):
  """A ragged prompt, then token by token; every logit on the way."""
  model, _ = forward(**changes)
  full = tokens(3, 10)
  prompt = np.array([5, 2, 4])
  want = run(full, changes.items())
  if not stacked:
    model = model.unstacked()

  @jax.jit
  def step(cache, batch, positions, segment_ids):
    return model(
      batch, positions=positions, segment_ids=segment_ids, cache=cache
    )

  cache = KVCache.zeros(model.config, 3, 12, "float32", stacked=stacked)
  count = np.broadcast_to(np.arange(5, dtype=np.int32), (3, 5))
  real = (count < prompt[:, None]).astype(np.int32)
  batch = np.where(real == 1, full[:, :5], 3)
  hidden, cache = step(cache, batch, count, real)
  for row, n in enumerate(prompt):
    close(hidden[row, :n], want[row, :n])
    # Padding left its slots empty.
    assert cache.positions[row].tolist() == [*range(n), *[-1] * (12 - n)]
    np.testing.assert_array_equal(
      np.stack([np.asarray(k)[row, n:] for k in cache.k]), 0.0
    )
  for i in range(5):
    at = (prompt + i).astype(np.int32)[:, None]
    # The last row stops early: it is padding from then on.
    real = np.array([[1], [1], [int(i < 3)]], np.int32)
    token = np.take_along_axis(full, at, axis=1)
    hidden, cache = step(cache, token, at, real)
    for row in range(3):
      if real[row, 0]:
        close(hidden[row, 0], want[row, at[row, 0]])
  assert (np.asarray(cache.positions) >= 0).sum(axis=1).tolist() == [10, 7, 7]
  assert step._cache_size() == 2  # Prompt and token.


def test_a_cache_in_bfloat16_keeps_its_dtype():
  model, _ = forward()
  cache = KVCache.zeros(model.config, 1, 4, "bfloat16")
  hidden, cache = jax.jit(model.__call__)(tokens(1, 4), cache=cache)
  assert cache.k.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    hidden, run(tokens(1, 4)), **tolerance("attention", "bfloat16")
  )
  with pytest.raises(ValueError, match="5 tokens a row .* 4 slots"):
    model(tokens(1, 5), cache=cache)


MODES = [
  dict(unroll=2),
  dict(remat="dots"),
  dict(remat="block"),
  dict(remat="block", remat_every=3),
  dict(remat="nested"),
]


def loss_and_gradient(execution, model, batch):
  def loss(model):
    ids = jnp.where(batch < 3, 0, 1)  # Some padding.
    hidden = model(
      batch,
      segment_ids=ids,
      dropout_keys=row_keys(jax.random.key(0), jnp.arange(2)),
      execution=execution,
    )
    weights = ids.astype(jnp.float32)
    return cross_entropy(model, hidden, batch, weights, execution=execution)[0]

  # LLVM's plain code brings 2 of the 3,360 entries of a gradient out of the
  # tolerance.
  optimised = {"xla_backend_optimization_level": 3}
  return jax.jit(jax.value_and_grad(loss), compiler_options=optimised)(model)


@pytest.fixture(scope="module")
def plain():
  """What no rematerialisation gives; dropout must be drawn twice alike."""
  model = make(num_layers=6, residual_dropout=0.3, **PATTERN)
  batch = tokens(2, 9)
  return model, batch, loss_and_gradient(Execution(), model, batch)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_rematerialisation_changes_nothing(plain, mode):
  model, batch, want = plain
  got = loss_and_gradient(Execution(**mode), model, batch)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, **tolerance("gradient"))


def test_implementations_agree_in_the_model(plain):
  model, batch, want = plain
  execution = Execution(attention="reference")
  got = loss_and_gradient(execution, model, batch)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, **tolerance("gradient"))


def test_unstacked_layers_refuse_rematerialisation():
  model, _ = forward()
  with pytest.raises(ValueError, match="are for decoding"):
    model.unstacked()(tokens(1, 3), execution=Execution(remat="block"))


@pytest.mark.parametrize("changes", [{}, PATTERN], ids=["global", "pattern"])
def test_the_program_does_not_grow_with_depth(changes):
  def size(num_layers: int) -> int:
    config = dataclasses.replace(CONFIG, num_layers=num_layers, **changes)
    model = make(config, embed_dim=4, mlp_dim=4)
    loss = lambda model, batch: model(batch).sum()
    jaxpr = jax.make_jaxpr(jax.grad(loss))(model, tokens(1, 3))
    return sum(1 for _ in equations(jaxpr))

  assert size(64) == size(2)


def test_a_tied_head_has_one_owner():
  model, batch = make(tied=True), tokens(1, 5)
  untied, _ = forward()
  leaves = lambda model: len(jax.tree.leaves(model))
  assert leaves(untied) == leaves(model) + 1
  assert not hasattr(model, "head")
  table = np.asarray(model.embed.table[...])
  hidden = run(batch, {"tied": True}.items())
  close(model.logits(hidden), hidden @ table.T)
  close(untied.logits(hidden), hidden @ np.asarray(untied.head.w[...]))

  # Both uses reach the one gradient: rows that no token looks up have it too.
  def loss(model):
    return (model.logits(model(batch)) ** 2).sum()

  gradient = jax.jit(jax.grad(loss))(model).embed.table[...]
  assert (np.abs(gradient).max(axis=1) > 0).all()


def test_scales_and_caps_of_embeddings_and_logits():
  model, batch = make(logit_scale=0.5, logit_softcap=2.0), tokens(1, 5)
  plain, _ = forward()
  hidden = run(batch)
  bare = np.float64(plain.logits(hidden))
  close(model.logits(hidden), 2.0 * np.tanh(0.5 * bare / 2.0))
  assert np.abs(bare).max() > 2
  assert model.logits(hidden).dtype == jnp.float32

  larger = make()
  larger.embed.table[...] = 3.0 * larger.embed.table[...]
  scaled = run(batch, {"embed_scale": 3.0}.items())
  close(scaled, jax.jit(larger)(batch))
  assert np.abs(scaled - hidden).max() > 0.1


def test_a_final_norm_unless_layers_end_with_one():
  assert hasattr(make(), "final_norm")
  post = make(norm_placement="post")
  assert not hasattr(post, "final_norm")
  scale = np.asarray(post.layers.mlp_norm.scale[...])[-1]
  batch = tokens(2, 5)
  hidden = run(batch, {"norm_placement": "post"}.items()) / scale
  close((hidden**2).mean(axis=-1), np.ones((2, 5)), rtol=1e-3)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_weights_of_zero_give_no_nan(norm):
  model = jax.tree.map(jnp.zeros_like, make(norm=norm, qk_norm=True))
  batch = tokens(2, 5)

  def loss(model):
    weights = jnp.ones(batch.shape, jnp.float32)
    return cross_entropy(model, model(batch), batch, weights)[0]

  value, gradient = jax.jit(jax.value_and_grad(loss))(model)
  np.testing.assert_allclose(value, 10 * np.log(37), **tolerance("loss"))
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
  ("policy", "dtype"), [("bf16", "bfloat16"), ("bf16_operands", "float32")]
)
def test_policies_are_near_float32(policy, dtype):
  model, batch = make(), tokens(2, 9)
  execution = Execution(precision=POLICIES[policy])
  low = jax.jit(lambda batch: model(batch, execution=execution))(batch)
  assert low.dtype == dtype
  want = run(batch)
  error = np.abs(np.float32(low) - want).mean() / np.abs(want).mean()
  assert 1e-4 < error < 2e-2


def test_a_cache_needs_causality():
  model = make(causal=False)
  cache = KVCache.zeros(model.config, 1, 4, "float32")
  with pytest.raises(ValueError, match="wanted model.causal=True"):
    model(tokens(1, 2), cache=cache)
