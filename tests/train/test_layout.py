"""Layers of a state: into the order of a pipeline and back."""

import dataclasses

import jax
import numpy as np
import pytest

from model.config import ModelConfig
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from tests.train import tiny
from train import experts
from train import layout as layout_lib
from train.config import OptimizerConfig
from train.state import (
  abstract_arranged,
  abstract_state,
  shardings_of,
  state_from_model,
)

FIVE = dataclasses.replace(tiny.MHA, num_layers=5)


def mesh_of(**axes):
  return make_mesh(MeshConfig(**{"fsdp": 1} | axes))


def layout_of(config: ModelConfig, mesh, virtual_stages: int = 1):
  return layout_lib.make_layout(
    config, mesh, seq_len=24, virtual_stages=virtual_stages
  )


def test_a_state_goes_there_and_back():
  """Five layers on four virtual stages: places stay empty, and hold 0."""
  mesh = mesh_of(pipeline=2, tensor=2)
  layout = layout_of(FIVE, mesh, 2)
  assert sum(layout.counts) == 5 and not layout.is_even
  rule = tiny.optimizer_of(OptimizerConfig())
  model = tiny.random_model(FIVE)
  placed = dict(mesh=mesh, rules=Rules())
  state = state_from_model(model, rule, seed=0, layout=layout, **placed)
  w = state.model.layers.mlp.up.w[...]
  assert w.shape[0] == 4 * layout.depth
  assert w.sharding.spec[0] == "pipeline"
  empty = np.flatnonzero(layout.order < 0)
  assert empty.size and not np.any(np.asarray(w)[empty])

  abstract = jax.eval_shape(
    lambda model: layout_lib.natural(model, layout), state.model
  )
  assert abstract.layers.mlp.up.w.shape[0] == 5
  make_model = lambda rngs: type(model)(FIVE, rngs=rngs)
  natural = abstract_state(make_model, rule, **placed)
  back = layout_lib.to_natural(state, layout, shardings_of(natural))
  for a, b in zip(jax.tree.leaves(back.model), jax.tree.leaves(model)):
    np.testing.assert_array_equal(a, b)
  arranged = abstract_arranged(natural, layout, **placed)
  again = layout_lib.to_arranged(back, layout, shardings_of(arranged))
  for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state)):
    np.testing.assert_array_equal(a, b)
    assert a.sharding == b.sharding


def test_layers_weigh_by_what_they_compute():
  """A heavy head leaves the last stage fewer layers; the balance is told."""
  mesh = mesh_of(pipeline=4)
  config = dataclasses.replace(FIVE, num_layers=16)
  light = layout_of(config, mesh)
  heavy = dataclasses.replace(config, vocab_size=2000)
  found = layout_of(heavy, mesh)
  assert found.counts[-1] < min(found.counts[:-1])
  assert found.counts[-1] < light.counts[-1]
  assert layout_lib.imbalance(found, heavy, 24) < 1.2
  worse = dataclasses.replace(found, counts=(4, 4, 4, 4))
  assert layout_lib.imbalance(worse, heavy, 24) > 1.3


def test_no_pipeline_no_layout():
  mesh = mesh_of(data=2)
  assert layout_of(FIVE, mesh) is None
  tree = {"model": 1}
  assert layout_lib.natural(tree, None) is tree
  with pytest.raises(ValueError, match="step.virtual_stages=2 .*mesh.pipeline"):
    layout_of(FIVE, mesh, 2)
  with pytest.raises(ValueError, match="5 layers cannot .* 8 virtual stages"):
    layout_of(FIVE, mesh_of(pipeline=8))


def test_biases_of_routers_move_where_their_layer_stands():
  """Counts are by layers of the model, biases by places of the stages."""
  moe = dataclasses.replace(tiny.MOE.moe, bias_rate=0.1)
  config = dataclasses.replace(tiny.MOE, moe=moe, num_layers=5)
  layout = layout_of(config, mesh_of(pipeline=2), 2)
  model = jax.device_put(tiny.random_model(config))
  rng = np.random.default_rng(0)
  counts = rng.uniform(size=(5, moe.num_experts)).astype(np.float32)
  stats = {"expert_counts": counts}
  ours = experts.rebalanced(layout_lib.arranged(model, layout), stats, layout)
  ours = layout_lib.natural(ours, layout).layers.moe.router.bias[...]
  theirs = experts.rebalanced(model, stats).layers.moe.router.bias[...]
  np.testing.assert_array_equal(ours, theirs)
  before = model.layers.moe.router.bias[...]
  assert np.all(np.any(np.asarray(theirs) != before, axis=1))
