"""Experts in a training step: their losses and their biases.

That no mesh changes them is shown in `test_matrix.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import Moe
from model.execution import Execution
from sharding.arrays import to_global
from sharding.axes import MeshConfig, Rules
from tests.tolerances import tolerance
from tests.train import tiny, tiny_run
from train import pretrain
from train.config import OptimizerConfig
from train.initial import load_model
from train.objective import lm_loss
from train.step import make_eval_step

SGD = OptimizerConfig(kind="sgd", momentum=0.9, clip_norm=None)
MOE = tiny.MOE.moe


@pytest.fixture(scope="module")
def model():
  return tiny.random_model(tiny.MOE)


@functools.partial(jax.jit, static_argnames="objective")
def plain(model, batch, objective):
  """Mean loss and mean router loss as they are defined, and statistics."""

  def loss(model):
    names = ("positions", "segment_ids")
    hidden, stats = model.forward(
      batch["tokens"], **{name: batch[name] for name in names}
    )
    total, _ = objective.loss(model, hidden, batch, Execution())
    tokens = jnp.sum(batch["segment_ids"] != 0)
    mean = total / jnp.sum(batch["loss_weights"])
    router = jnp.sum(stats["router_loss_B"]) / tokens
    return mean + router, (mean, router, stats)

  (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(model)
  return *aux, grads


def test_a_step_minimises_both_means_and_moves_the_biases(model):
  """Two micro-batches, against the definition without any."""
  batch = tiny.packed_batch()
  objective = lm_loss(z_loss=1e-3)
  mean, router, stats, grads = plain(model, batch, objective)
  ((state, metrics),) = tiny.train(
    model, SGD, tiny.one_device(), num_steps=1, accumulation=2
  )
  close = tolerance("mesh")
  np.testing.assert_allclose(metrics["loss"], mean, **close)
  np.testing.assert_allclose(metrics["router_loss"], router, **close)
  # The momentum after the first step is the gradient.
  far = tiny.distances(state.opt_state[0].trace, grads)
  assert max(far.values()) < close["rtol"], far
  # It does reach the routers.
  assert np.abs(grads.layers.moe.router.w[...]).max() > 1e-3

  counts_LE = np.asarray(stats["expert_counts"], np.float64)
  tokens = np.count_nonzero(batch["segment_ids"])
  np.testing.assert_array_equal(counts_LE.sum(axis=1), tokens * MOE.num_active)
  means = counts_LE.mean(axis=1, keepdims=True)
  want = {
    "router_balance": stats["balance"] / tokens / 2,
    "router_z": stats["z"] / tokens / 2,
    "router_load": counts_LE.max() / means[0, 0],
    "router_dropped": 0.0,
  }
  for name, value in want.items():
    np.testing.assert_allclose(metrics[name], value, **close, err_msg=name)
  assert 1.0 < want["router_load"] < MOE.num_experts

  moved = MOE.bias_rate * np.sign(means - counts_LE)
  assert {-1, 1} <= set(np.sign(moved).ravel())
  np.testing.assert_allclose(
    state.model.layers.moe.router.bias[...],
    model.layers.moe.router.bias[...] + np.float32(moved),
    rtol=1e-6,
  )


def test_only_counts_move_the_biases(model):
  """Not decay, nor any moment."""
  optimizer = OptimizerConfig(weight_decay=0.5)
  batch = tiny.packed_batch()
  batch["segment_ids"][:] = 0  # No token is routed.
  state, step = tiny.start(model, optimizer, tiny.one_device())
  start = np.array(model.layers.moe.router.bias[...])
  state, metrics = step(state, to_global(batch, tiny.one_device(), Rules()))
  np.testing.assert_array_equal(state.model.layers.moe.router.bias[...], start)
  assert metrics["router_loss"] == 0 and metrics["nonfinite"] == 0


def test_an_evaluation_is_of_the_loss_alone(model):
  mesh, batch = tiny.one_device(), tiny.packed_batch()
  objective = lm_loss()
  state, _ = tiny.start(model, SGD, mesh)
  places = jax.tree.map(lambda x: x.sharding, state.model)
  run = make_eval_step(objective, Execution(mesh=mesh), places)
  loss, weight, aux = run(state.model, to_global(batch, mesh, Rules()))
  mean = plain(model, batch, objective)[0]
  np.testing.assert_allclose(loss / weight, mean, **tolerance("loss"))
  assert aux.keys() == {"nll", "z_loss"}


def test_a_run_records_its_routers_and_keeps_their_biases(tmp_path):
  tiny_run.write_data(tmp_path)
  config = tiny_run.config(tmp_path)
  experts = Moe(num_experts=4, num_active=2, balance_loss=0.01, bias_rate=0.1)
  config = dataclasses.replace(
    config,
    model=dataclasses.replace(config.model, moe=experts),
    num_steps=3,
    mesh=MeshConfig(expert=2, fsdp=1),
  )
  result = pretrain.run(config, str(tmp_path / "run"))
  names = ("loss", "balance", "z", "load", "dropped")
  for line in result.history:
    assert {f"router_{name}" for name in names} < line.keys()
  # Before any token was seen all experts were as likely.
  assert 1.0 < result.history[0]["router_load"] < 4.0

  mesh = tiny.one_device()
  model = load_model(str(tmp_path / "run"), mesh=mesh, rules=Rules())
  assert model.config == config.model
  bias = result.state.model.layers.moe.router.bias[...]
  assert np.abs(bias).max() > 0
  np.testing.assert_array_equal(model.layers.moe.router.bias[...], bias)
