"""Rules: literal specs, and errors that name array, dim, axis and sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from sharding import rules as r
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh

RULES = Rules()
NAMES = ("embed", "kv_heads", "head_dim")


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


@pytest.mark.parametrize(
  "names, want",
  [
    (("embed", "heads", "head_dim"), P("fsdp", "tensor", None)),
    (("vocab", "embed"), P("tensor", "fsdp")),
    (("layers", "mlp", "embed"), P("pipeline", "tensor", "fsdp")),
    (("batch", "seq", None), P(("data", "fsdp", "expert"), "context", None)),
    (
      ("batch", "residual_seq", None),
      P(("data", "fsdp", "expert"), ("context", "tensor"), None),
    ),
    ((), P()),
  ],
)
def test_specs(names, want):
  assert r.spec(names, RULES) == want


def test_collision_shows_both_dims_and_the_axis():
  with pytest.raises(ValueError) as error:
    r.spec(("batch", "residual_seq", "mlp"), RULES, array="hidden")
  for part in (
    "hidden('batch', 'residual_seq', 'mlp')",
    "dim 1 ('residual_seq' -> ('context', 'tensor'))",
    "dim 2 ('mlp' -> ('tensor',))",
    "mesh axis 'tensor'",
    "rules.residual_seq or rules.mlp",
  ):
    assert part in str(error.value)


def test_one_axis_twice_in_one_dim_is_a_collision():
  rules = dataclasses.replace(RULES, batch=("data", "data"))
  with pytest.raises(ValueError, match="mesh axis 'data'"):
    r.spec(("batch",), rules)


def test_unknown_names():
  with pytest.raises(ValueError, match="unknown logical dim 'head'"):
    r.spec(("head",), RULES)
  rules = dataclasses.replace(RULES, mlp=("tensors",))
  with pytest.raises(ValueError) as error:
    r.spec(("embed", "mlp"), rules)
  assert "rules.mlp=('tensors',)" in str(error.value)
  assert "'data', 'fsdp', 'expert', 'context', 'tensor'" in str(error.value)


def test_indivisible_dim_names_everything(mesh):
  with pytest.raises(ValueError) as error:
    r.sharding("k.w", (16, 3, 8), NAMES, mesh, RULES)
  for part in (
    "k.w('embed', 'kv_heads', 'head_dim')",
    "(16, 3, 8)",
    "dim 1 ('kv_heads', size 3)",
    "tensor=2",
    "rules.kv_heads",
  ):
    assert part in str(error.value)
  with pytest.raises(ValueError, match=r"data=2 x fsdp=2 \(4 parts\)"):
    r.sharding("tokens", (6, 5), ("batch", "seq"), mesh, RULES)


def test_axes_of_size_one_divide_anything():
  mesh = make_mesh(MeshConfig(fsdp=8))
  r.sharding("k.w", (16, 3, 8), NAMES, mesh, RULES)


def test_constrain_places_and_refuses(mesh):
  f = jax.jit(lambda x: r.constrain(x, ("batch", None, "mlp"), mesh, RULES))
  assert f(jnp.ones((8, 5, 6))).sharding.spec == P(
    ("data", "fsdp"), None, "tensor"
  )
  with pytest.raises(ValueError, match="activation.*'mlp', size 7"):
    f(jnp.ones((8, 5, 7)))


def test_layers_that_stages_do_not_share_are_split_elsewhere():
  """Three layers on two stages: a checkpoint holds no part of a layer twice."""
  mesh = make_mesh(MeshConfig(pipeline=2, fsdp=2, tensor=2))
  placed = r.tree_shardings(jax.eval_shape(Net), mesh, RULES)
  spec = placed.layers.w.get_value().spec
  assert spec == P(None, ("fsdp", "pipeline"), "tensor")
  # 6 values of a bias do not divide by 4: they stay where they are.
  assert placed.layers.b.get_value().spec == P(None, "tensor")
  assert placed.last.w.get_value().spec == P("fsdp", "tensor")


class Layer(nnx.Module):
  def __init__(self, key, dim=12):
    self.w = nnx.Param(jax.random.normal(key, (dim, 6)), names=("embed", "mlp"))
    self.b = nnx.Param(jnp.zeros(6), names=("mlp",))


class Net(nnx.Module):
  def __init__(self, dim=12):
    keys = jax.random.split(jax.random.key(0), 3)
    self.layers = jax.vmap(lambda key: Layer(key, dim))(keys)
    self.last = Layer(keys[0], dim)


def test_tree_of_modules_with_stacked_layers(mesh):
  tree = {"net": jax.eval_shape(Net), "step": jnp.zeros(())}
  placed = r.tree_shardings(tree, mesh, RULES)
  assert isinstance(placed["net"], Net)
  layers = placed["net"].layers
  assert layers.w.get_value().spec == P("pipeline", "fsdp", "tensor")
  assert layers.b.get_value().spec == P("pipeline", "tensor")
  assert placed["net"].last.w.get_value().spec == P("fsdp", "tensor")
  assert placed["step"].spec == P()


def test_tree_error_names_the_path(mesh):
  with pytest.raises(ValueError, match=r"net\.last\.w.*'embed', size 13"):
    r.tree_shardings({"net": jax.eval_shape(lambda: Net(13))}, mesh, RULES)
