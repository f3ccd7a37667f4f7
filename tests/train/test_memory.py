"""Memory as the compiler plans it: rematerialisation, and the logits."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from model.config import ModelConfig, Rope
from model.execution import Execution
from model.transformer import Transformer
from tests.tolerances import tolerance
from tests.train import tiny
from tests.train.jaxprs import equations
from train.objective import lm_loss

CONFIG = ModelConfig(
  vocab_size=40,
  num_layers=16,
  embed_dim=16,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_dim=24,
  max_positions=128,
  rope=Rope(theta=1e4),
)
B, T = 4, 128
# The input of a block, in bytes.
UNIT = B * T * CONFIG.embed_dim * 4

POLICIES = {
  "none": Execution(),
  "dots": Execution(remat="dots"),
  "block": Execution(remat="block"),
  "every 4th": Execution(remat="block", remat_every=4),
  "nested": Execution(remat="nested"),
}


@functools.cache
def gradient(policy: str, num_layers: int):
  """The compiled loss and gradient of a model of so many layers."""
  config = dataclasses.replace(CONFIG, num_layers=num_layers)
  model = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  batch = tiny.packed_batch(rows=B, length=T, vocab=40)
  loss_fn = lm_loss()

  def loss(model, batch):
    return loss_fn(model, batch, None, POLICIES[policy])[0]

  return jax.jit(jax.value_and_grad(loss)).lower(model, batch).compile()


def temporary(policy: str, num_layers: int) -> int:
  """Bytes that live during the step and not after it."""
  compiled = gradient(policy, num_layers)
  return compiled.memory_analysis().temp_size_in_bytes


def growth(policy: str) -> tuple[float, float]:
  """From 16 to 64 layers, and from 64 to 256, in inputs of a block."""
  at = [temporary(policy, num_layers) / UNIT for num_layers in (16, 64, 256)]
  return at[1] - at[0], at[2] - at[1]


def test_per_block_keeps_one_input_a_layer():
  np.testing.assert_allclose(growth("block"), (48, 192), rtol=0.02)


@pytest.mark.slow
def test_every_fourth_block_keeps_a_quarter():
  # A group's own activations are the same at every depth.
  first, second = growth("every 4th")
  np.testing.assert_allclose((first, second), (12, 48), rtol=0.25)


def test_nested_scan_grows_with_the_root():
  """2 sqrt(L) inputs: 4 + 4, 8 + 8, 16 + 16; the rest are weights."""
  first, second = growth("nested")
  assert 8 <= first <= 1.6 * 8
  assert 16 <= second <= 1.7 * 16
  # Twice as much for four times the layers; linear would be four times.
  assert second / first < 2.5
  assert temporary("nested", 256) < 0.4 * temporary("block", 256)


def test_what_is_kept_falls_from_policy_to_policy():
  at_16 = [temporary(name, 16) for name in ("none", "dots", "block")]
  assert at_16[0] > 1.5 * at_16[1] > 1.5 * 1.5 * at_16[2]


@pytest.mark.parametrize(
  "policy", [name for name in POLICIES if name != "none"]
)
def test_values_do_not_depend_on_the_policy(policy):
  model = tiny.random_model(CONFIG)
  batch = tiny.packed_batch(rows=B, length=T, vocab=40)
  ours = gradient(policy, 16)(model, batch)
  theirs = gradient("none", 16)(model, batch)
  far = tiny.distances(*jax.device_get((ours, theirs)))
  assert max(far.values()) < tolerance("mesh")["rtol"], far


def whole_logits(function, *args, vocab: int) -> list[tuple[int, ...]]:
  """Shapes of traced arrays as large as all logits, and spread over V."""
  return [
    shape
    for equation in equations(jax.make_jaxpr(function)(*args))
    for shape in (getattr(v.aval, "shape", ()) for v in equation.outvars)
    if math.prod(shape) >= B * T * vocab and vocab in shape
  ]


@pytest.mark.parametrize("policy", ["none", "nested"])
def test_logits_never_exist_as_a_whole(policy):
  """Neither [B, T, V] nor [B T, V], forward or backward, in any dtype."""
  config = dataclasses.replace(CONFIG, vocab_size=1031, num_layers=2)
  model = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  batch = tiny.packed_batch(rows=B, length=T, vocab=1031)
  # Even a chunk of all tokens is cut in two.
  execution = dataclasses.replace(POLICIES[policy], loss_chunk=10**9)

  def loss(model):
    return lm_loss(z_loss=1e-4)(model, batch, None, execution)[0]

  assert not whole_logits(jax.value_and_grad(loss), model, vocab=1031)
  logits = lambda model: model.logits(model(batch["tokens"]))
  assert whole_logits(logits, model, vocab=1031), "the test sees nothing"
