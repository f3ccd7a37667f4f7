"""Dropout: how much, where, and the same on every split of the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import attention, block, transformer
from model.dropout import dropout, fold, row_keys
from tests.model.tiny import make, tokens
from tests.tolerances import tolerance

RATES = ("embed_dropout", "residual_dropout", "attention_dropout")


def keys(*rows: int):
  return row_keys(jax.random.key(0), jnp.array(rows))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_rate_and_scale(rate):
  x = jnp.full((3, 50, 200), 2.0)
  y = np.asarray(dropout(x, rate, keys(0, 1, 2)))
  kept = y != 0
  np.testing.assert_allclose(
    y[kept], 2 / (1 - rate), **tolerance("elementwise")
  )
  # Five standard deviations of a mean over 10000 draws.
  bound = 5 * (rate * (1 - rate) / 10_000) ** 0.5
  for row in kept:
    assert abs(row.mean() - (1 - rate)) < bound
  # Masks of different rows agree as often as chance has it.
  agree = (kept[0] == kept[1]).mean()
  assert abs(agree - rate**2 - (1 - rate) ** 2) < 0.03


def test_off_without_keys_or_rate():
  x = jnp.ones((2, 3))
  assert dropout(x, 0.5, None) is x
  assert dropout(x, 0.0, keys(0, 1)) is x
  assert fold(None, 3) is None


def test_keeps_the_dtype():
  x = jnp.ones((2, 3), jnp.bfloat16)
  assert dropout(x, 0.5, keys(0, 1)).dtype == jnp.bfloat16


def test_a_row_has_its_mask_wherever_it_is_computed():
  x = jnp.ones((4, 5, 6))
  whole = dropout(x, 0.5, keys(0, 1, 2, 3))
  split = [dropout(x[:2], 0.5, keys(2, 3)), dropout(x[:2], 0.5, keys(0, 1))]
  np.testing.assert_array_equal(whole[2:], split[0])
  np.testing.assert_array_equal(whole[:2], split[1])


def test_a_token_has_its_mask_wherever_it_stands():
  x, order = jnp.ones((2, 5, 40)), np.array([[3, 1, 0, 4, 2], [0, 4, 2, 1, 3]])
  numbers = np.array([[7, 8, 9, 30, 31], [0, 1, 2, 3, 4]], np.int32)
  mask = dropout(x, 0.5, keys(5, 9), numbers)
  moved = dropout(x, 0.5, keys(5, 9), np.take_along_axis(numbers, order, 1))
  want = np.take_along_axis(np.asarray(mask), order[..., None], 1)
  np.testing.assert_array_equal(moved, want)
  # No two tokens, and no two rows, share a mask.
  assert len({bytes(np.asarray(row)) for row in mask.reshape(10, 40)}) == 10


@pytest.fixture(scope="module")
def runs():
  """Outputs of one model with one kind of dropout at a time."""
  batch = tokens(4, 7)
  model = make(**dict.fromkeys(RATES, 0.3))

  @jax.jit
  def run(batch, dropout_keys):
    return {
      name: model_of(name)(batch, dropout_keys=dropout_keys)
      for name in (*RATES, "all")
    }

  def model_of(name):
    others = [rate for rate in RATES if name not in (rate, "all")]
    return with_config(model, **dict.fromkeys(others, 0.0))

  return model, batch, run


def with_config(model, **changes):
  """The same weights under another config."""
  other = make(dataclasses.replace(model.config, **changes))
  return jax.tree.unflatten(jax.tree.structure(other), jax.tree.leaves(model))


def test_each_kind_is_active_in_the_model(runs):
  model, batch, run = runs
  off = model(batch)
  outputs = run(batch, keys(0, 1, 2, 3)) | {"off": off}
  for name, other in ((a, b) for a in outputs for b in outputs if a < b):
    difference = np.abs(outputs[name] - outputs[other]).max(axis=(1, 2))
    assert difference.min() > 0.01, (name, other)


def test_evaluation_is_without_dropout(runs):
  model, batch, _ = runs
  plain = with_config(model, **dict.fromkeys(RATES, 0.0))
  np.testing.assert_array_equal(model(batch), plain(batch))


def test_micro_batches_draw_the_masks_of_the_whole(runs):
  _, batch, run = runs
  whole = run(batch, keys(10, 11, 12, 13))
  # Rows in another order stand for any split: same shape, no new compilation.
  order = np.array([2, 0, 3, 1])
  moved = run(batch[order], keys(12, 10, 13, 11))
  for name in whole:
    np.testing.assert_allclose(
      np.asarray(whole[name])[order], moved[name], **tolerance("mesh")
    )
  other = run(batch, keys(10, 11, 12, 14))["all"]
  assert np.abs(other[3] - whole["all"][3]).max() > 0.01


def test_no_two_uses_share_a_key(monkeypatch):
  """Layers, branches, embeddings and rows all draw masks of their own."""
  seen = []

  def record(keys_B):
    seen.extend(map(tuple, np.asarray(jax.random.key_data(keys_B)).tolist()))

  def thin(x, rate, keys_B, numbers_BT):
    record(keys_B)
    np.testing.assert_array_equal(numbers_BT, [[0, 1, 2]] * 2)
    return x

  def words(keys_B, index, num_heads):
    record(keys_B)
    B, T = index.shape
    return jnp.zeros((2, B, num_heads, T), jnp.uint32)

  monkeypatch.setattr(attention, "row_words", words)
  monkeypatch.setattr(block, "dropout", thin)
  monkeypatch.setattr(transformer, "dropout", thin)
  model = make(**dict.fromkeys(RATES, 0.3)).unstacked()
  model(tokens(2, 3), dropout_keys=keys(0, 1))
  assert len(seen) == 2 * (3 * 3 + 1)
  assert len(set(seen)) == len(seen)


def test_stacked_layers_draw_the_same_masks(runs):
  model, batch, run = runs
  dropout_keys = keys(0, 1, 2, 3)
  apart = jax.jit(model.unstacked())(batch, dropout_keys=dropout_keys)
  np.testing.assert_allclose(
    run(batch, dropout_keys)["all"], apart, **tolerance("mesh")
  )
