"""AdamW and SGD against a derivation in numpy; the decay mask, literally."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.config import ModelConfig, Rope
from model.transformer import Transformer
from tests.tolerances import tolerance
from train.config import OptimizerConfig, ScheduleConfig
from train.optimizers import decayed, global_norm, make_optimizer
from train.schedules import make_schedule

SCHEDULE = make_schedule(ScheduleConfig(peak=3e-2, warmup_steps=3), 20)


class Weights(nnx.Module):
  """A matrix that decays, a norm scale and a bias that do not."""

  def __init__(self, rng):
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    self.w = nnx.Param(draw(5, 7), names=("embed", "mlp"))
    self.scale = nnx.Param(draw(5), names=("embed",))
    self.b = nnx.Param(draw(2, 3), names=("heads", "head_dim"))


def in_numpy(config: OptimizerConfig, start: dict, grads: list[dict]) -> dict:
  """Loshchilov and Hutter, algorithm 2, and SGD with momentum; float64."""
  w = {k: np.float64(v) for k, v in start.items()}
  m = {k: np.zeros_like(v) for k, v in w.items()}
  v = {k: np.zeros_like(x) for k, x in w.items()}
  for t, grad in enumerate(grads, start=1):
    norm = np.sqrt(sum((np.float64(g) ** 2).sum() for g in grad.values()))
    clip = min(1.0, config.clip_norm / norm) if config.clip_norm else 1.0
    rate = float(SCHEDULE(t - 1))
    for k in w:
      g = np.float64(grad[k]) * clip
      if config.kind == "adamw":
        m[k] = config.b1 * m[k] + (1 - config.b1) * g
        v[k] = config.b2 * v[k] + (1 - config.b2) * g * g
        root = np.sqrt(v[k] / (1 - config.b2**t))
        direction = m[k] / (1 - config.b1**t) / (root + config.eps)
      else:
        m[k] = direction = config.momentum * m[k] + g
      decay = config.weight_decay if k == "w" else 0.0
      w[k] = w[k] - rate * (direction + decay * w[k])
  return w


@pytest.mark.parametrize(
  "config",
  [
    OptimizerConfig(),
    OptimizerConfig(b1=0.8, b2=0.99, eps=1e-3, weight_decay=0.5),
    OptimizerConfig(clip_norm=None, weight_decay=0.0),
    OptimizerConfig(kind="sgd"),
    OptimizerConfig(kind="sgd", weight_decay=0.0),
    OptimizerConfig(kind="sgd", momentum=0.9, clip_norm=2.5),
  ],
)
def test_numpy(config):
  rng = np.random.default_rng(0)
  model = Weights(rng)
  optimizer = make_optimizer(config, SCHEDULE)
  state = optimizer.start(model)[1]
  names = ("w", "scale", "b")
  start = {k: np.asarray(getattr(model, k)[...]) for k in names}
  grads, clipped = [], []
  for step in range(6):
    # Norms from 0.6 to 19, so that some steps are clipped.
    size = 0.1 * 2.0**step
    grad = jax.tree.map(lambda x, size=size: x * size, Weights(rng))
    grads.append({k: np.asarray(getattr(grad, k)[...]) for k in names})
    model, state, metrics = optimizer.update(
      grad, state, model, jnp.int32(step)
    )
    norm = np.sqrt(
      sum((g.astype(np.float64) ** 2).sum() for g in grads[-1].values())
    )
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
    assert metrics["learning_rate"] == SCHEDULE(step)
    clipped.append(bool(metrics["clip_factor"] < 1.0))
  if config.clip_norm is None:
    assert not any(clipped)
  else:
    assert clipped[-1] and not clipped[0]
  want = in_numpy(config, start, grads)
  for k in names:
    np.testing.assert_allclose(
      getattr(model, k)[...], want[k], **tolerance("matmul"), err_msg=k
    )


def test_moments_are_float32_and_named_like_weights():
  model = Weights(np.random.default_rng(0))
  state = make_optimizer(OptimizerConfig(), SCHEDULE).start(model)[1]
  adam = state[0]
  for moment in (adam.mu, adam.nu):
    assert moment.w.get_metadata("names") == ("embed", "mlp")
    assert {x.dtype for x in jax.tree.leaves(moment)} == {jnp.dtype("float32")}


def test_zero_gradient_is_not_divided_by_its_norm():
  model = Weights(np.random.default_rng(0))
  optimizer = make_optimizer(OptimizerConfig(), SCHEDULE)
  zeros = jax.tree.map(jnp.zeros_like, model)
  model, _, metrics = optimizer.update(
    zeros, optimizer.start(model)[1], model, jnp.int32(0)
  )
  assert metrics["clip_factor"] == 1.0
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(model))


def test_global_norm():
  tree = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
  assert global_norm(tree) == 5.0


def test_decay_mask_of_a_model_with_every_weight():
  config = ModelConfig(
    vocab_size=24,
    num_layers=2,
    embed_dim=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=20,
    max_positions=32,
    rope=Rope(theta=1e4),
    norm="layer",
    norm_bias=True,
    norm_placement="sandwich",
    qk_norm=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
  )
  model = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  flat, _ = jax.tree_util.tree_flatten_with_path(decayed(model))
  marks = {
    jax.tree_util.keystr(path, simple=True, separator="."): mark
    for path, mark in flat
  }
  assert {
    name.removesuffix(".value") for name, mark in marks.items() if mark
  } == {
    "embed.table",
    "head.w",
    "layers.attention.k.w",
    "layers.attention.out.w",
    "layers.attention.q.w",
    "layers.attention.v.w",
    "layers.mlp.down.w",
    "layers.mlp.gate.w",
    "layers.mlp.up.w",
  }
  kept = {
    name.removesuffix(".value") for name, mark in marks.items() if not mark
  }
  assert {
    "layers.attention.q.b",
    "layers.attention.q_norm.scale",
    "layers.mlp_post_norm.bias",
    "final_norm.scale",
  } <= kept
  # Four biases of attention, three of the mlp; scale and bias of five norms;
  # scales of the two norms of queries and keys.
  assert len(kept) == 4 + 3 + 2 * 5 + 2


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"b2": 1.0}, "optimizer.b2"),
    ({"eps": 0.0}, "optimizer.eps"),
    ({"weight_decay": -0.1}, "optimizer.weight_decay"),
    ({"clip_norm": 0.0}, "optimizer.clip_norm"),
    ({"momentum": -0.5}, "optimizer.momentum"),
  ],
)
def test_bad_values(changes, message):
  with pytest.raises(ValueError, match=message):
    OptimizerConfig(**changes)


def test_unknown_kind():
  with pytest.raises(ValueError, match="'adamw' or 'sgd', got 'adam'"):
    make_optimizer(OptimizerConfig(kind="adam"), SCHEDULE)


def test_onebit_adam_is_adamw_until_its_variance_stands_still():
  """Then its updates are those of momenta over one and the same root."""
  grads = [{"w": jnp.array([0.3, -2.0]) * k} for k in (1.0, 3.0, 0.5, 7.0)]
  weights = {"w": jnp.zeros(2)}
  settings = {"b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
  adamw, onebit = (
    make_optimizer(
      OptimizerConfig(**settings, clip_norm=None, **kind), SCHEDULE
    )
    for kind in ({}, {"kind": "onebit_adam", "freeze_step": 2})
  )
  states = [rule.direction.init(weights) for rule in (adamw, onebit)]
  m = v = np.zeros(2)
  directions = [np.zeros(2)] * 2
  for step, g in enumerate(grads):
    for i, rule in enumerate((adamw, onebit)):
      direction, states[i] = rule.direction.update(g, states[i], weights)
      directions[i] = direction["w"]
    m = 0.9 * m + 0.1 * np.asarray(g["w"], np.float64)
    if step < 2:
      np.testing.assert_allclose(directions[1], directions[0], rtol=1e-6)
      v = 0.99 * v + 0.01 * np.asarray(g["w"], np.float64) ** 2
    want = (
      m / (1 - 0.9 ** (step + 1)) / np.sqrt(v / (1 - 0.99 ** min(step + 1, 2)))
    )
    np.testing.assert_allclose(directions[1], want, rtol=1e-5)
  assert np.abs(directions[1] / directions[0] - 1).min() > 0.1
