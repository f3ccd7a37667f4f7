"""The state: born where it lives, the same on every mesh, and whole."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from tests.tolerances import tolerance
from tests.train import tiny
from train import state as s
from train.config import OptimizerConfig

RULES = Rules()
RULE = tiny.optimizer_of(OptimizerConfig())


class Layer(nnx.Module):
  def __init__(self, key):
    w = jax.random.normal(key, (16, 6))
    self.w = nnx.Param(w, names=("embed", "mlp"))


class Net(nnx.Module):
  def __init__(self, rngs, dim=8):
    table = jax.random.normal(rngs.params(), (10, dim))
    self.table = nnx.Param(table, names=("vocab", "embed"))
    self.layers = jax.vmap(Layer)(jax.random.split(rngs.params(), 3))


def mesh_of(data, fsdp, tensor):
  return make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor))


def test_every_leaf_is_born_in_its_place():
  mesh = mesh_of(2, 2, 2)
  state = s.init_state(Net, RULE, seed=0, mesh=mesh, rules=RULES)
  adam = state.opt_state[0]
  for tree in (state.model, adam.mu, adam.nu):
    assert tree.table[...].sharding.spec == P("tensor", "fsdp")
    assert tree.layers.w[...].sharding.spec == P("pipeline", "fsdp", "tensor")
    assert tree.layers.w[...].addressable_shards[0].data.shape == (3, 8, 3)
  assert state.step.sharding.spec == state.rng.sharding.spec == P()
  assert adam.count.sharding.spec == P()
  assert int(state.step) == 0


def test_values_do_not_depend_on_the_mesh():
  first, *others = [
    jax.device_get(s.init_state(Net, RULE, seed=3, mesh=mesh, rules=RULES))
    for mesh in (tiny.one_device(), mesh_of(1, 8, 1), mesh_of(2, 2, 2))
  ]
  for other in others:
    # The same random bits; XLA may round their transformation otherwise.
    np.testing.assert_array_equal(other.rng, first.rng)
    close = functools.partial(
      np.testing.assert_allclose, **tolerance("elementwise")
    )
    jax.tree.map(close, other, first)
  other_seed = s.init_state(
    Net, RULE, seed=4, mesh=tiny.one_device(), rules=RULES
  )
  for name in ("table", "rng"):
    a, b = (
      (x.rng if name == "rng" else x.model.table[...])
      for x in (first, other_seed)
    )
    assert not np.array_equal(a, b)


def test_abstract_state_is_what_init_makes():
  mesh = mesh_of(2, 2, 2)
  abstract = s.abstract_state(Net, RULE, mesh=mesh, rules=RULES)
  state = s.init_state(Net, RULE, seed=0, mesh=mesh, rules=RULES)
  assert jax.tree.structure(abstract) == jax.tree.structure(state)
  for want, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state)):
    assert isinstance(want, jax.ShapeDtypeStruct)
    assert (want.shape, want.dtype) == (leaf.shape, leaf.dtype)
    assert want.sharding == leaf.sharding
  for place, leaf in zip(
    jax.tree.leaves(s.shardings_of(abstract)), jax.tree.leaves(state)
  ):
    assert place == leaf.sharding


def test_given_weights_are_copied_and_survive_a_donation():
  model = Net(nnx.Rngs(5))
  host = jax.device_get(model)
  for mesh in (tiny.one_device(), mesh_of(2, 2, 2)):
    state = s.state_from_model(model, RULE, seed=0, mesh=mesh, rules=RULES)
    jax.tree.map(np.testing.assert_array_equal, state.model, host)
    consume = jax.jit(
      lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0
    )
    consume(state)
    assert state.model.table[...].is_deleted()
    jax.tree.map(np.testing.assert_array_equal, model, host)


def test_weights_that_do_not_divide_are_named():
  with pytest.raises(ValueError, match=r"model\.layers\.w.*'mlp', size 6"):
    s.abstract_state(Net, RULE, mesh=mesh_of(1, 2, 4), rules=RULES)


def test_step_key_is_a_function_of_seed_and_step():
  state = s.init_state(Net, RULE, seed=1, mesh=tiny.one_device(), rules=RULES)
  want = jax.random.fold_in(jax.random.key(1, impl="threefry2x32"), 6)
  later = dataclasses.replace(state, step=jnp.int32(6))
  assert s.step_key(later) == want
  assert s.step_key(state) != want
