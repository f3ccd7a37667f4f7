import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from model.families import llama
from model.formats import weights_map
from model.transformer import Transformer
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from tests.model.families.test_parity import config_of
from tests.oracles.named_checkpoint import NamedCheckpoint

CASE = "llama2"
NAMES = llama.FAMILY.names


class Edited(NamedCheckpoint):
  """A checkpoint with one tensor changed, added or removed."""

  def __init__(self, case, **changes):
    super().__init__(case)
    self.changes = {k.replace("__", "."): v for k, v in changes.items()}

  def names(self):
    removed = {k for k, v in self.changes.items() if v is None}
    return (super().names() | set(self.changes)) - removed

  def shape(self, name):
    if name in self.changes:
      return self.changes[name].shape
    return super().shape(name)

  def read(self, name):
    return self.changes[name] if name in self.changes else super().read(name)


def load(source, **kwargs):
  return weights_map.load(config_of(CASE), NAMES, source, **kwargs)


def test_matrices_are_turned_and_stacked():
  model, source = load(NamedCheckpoint(CASE)), NamedCheckpoint(CASE)
  config = config_of(CASE)
  D, H = config.embed_dim, config.head_dim
  for layer in range(config.num_layers):
    prefix = f"model.layers.{layer}."
    x = np.random.default_rng(0).standard_normal(D).astype(np.float32)
    q = source.read(prefix + "self_attn.q_proj.weight") @ x
    ours = np.einsum("DNH,D->NH", model.layers.attention.q.w[layer], x)
    np.testing.assert_allclose(
      ours, q.reshape(config.num_heads, H), rtol=1e-5, atol=1e-5
    )
    y = np.random.default_rng(1).standard_normal((config.num_heads, H))
    out = source.read(prefix + "self_attn.o_proj.weight") @ y.reshape(-1)
    ours = np.einsum("NHD,NH->D", model.layers.attention.out.w[layer], y)
    np.testing.assert_allclose(ours, out, rtol=1e-5, atol=1e-5)


def test_tensors_invert_load():
  source = NamedCheckpoint(CASE)
  written = dict(weights_map.tensors(load(source), NAMES, "float32"))
  assert written.keys() == source.names()
  for name, value in written.items():
    assert value.flags["C_CONTIGUOUS"]
    np.testing.assert_array_equal(value, source.read(name))


def test_all_misfits_are_named_before_reading():
  class Unreadable(Edited):
    def read(self, name):
      raise AssertionError("read before the names were checked")

  source = Unreadable(
    CASE,
    model__norm__weight=None,
    model__visual__weight=np.zeros(3, np.float32),
    lm_head__weight=np.zeros((61, 25), np.float32),
  )
  with pytest.raises(ValueError) as error:
    load(source)
  message = str(error.value)
  assert "1 missing: model.norm.weight" in message
  assert "1 unexpected: model.visual.weight" in message
  assert "lm_head.weight (61, 25), wanted (61, 24)" in message


def test_integers_are_refused():
  packed = np.zeros((61, 24), np.int8)
  with pytest.raises(ValueError, match="lm_head.weight is int8"):
    load(Edited(CASE, lm_head__weight=packed))


def test_a_family_without_a_name_is_refused():
  names = {k: v for k, v in NAMES.items() if k != "head.w"}
  with pytest.raises(ValueError, match="no name for head.w"):
    weights_map.load(config_of(CASE), names, NamedCheckpoint(CASE))


@pytest.mark.parametrize(
  "rules",
  [Rules(vocab=(), mlp=()), Rules(vocab=(), mlp=(), layers=("pipeline",))],
)
def test_shards_equal_the_whole(rules):
  mesh = make_mesh(MeshConfig(pipeline=2, fsdp=2, tensor=2))
  counted = []

  class Counted(NamedCheckpoint):
    def read(self, name):
      counted.append(name)
      return super().read(name)

  source = Counted(CASE)
  sharded = load(source, mesh=mesh, rules=rules)
  assert sorted(counted) == sorted(source.names())  # each of them once
  q = sharded.layers.attention.q.w.get_value()
  shard = q.sharding.shard_shape(q.shape)
  assert np.prod(shard) * (8 if rules.layers else 4) == np.prod(q.shape)
  whole = load(NamedCheckpoint(CASE))
  for a, b in zip(
    jax.tree.leaves(sharded), jax.tree.leaves(whole), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_every_leaf_of_every_kind_has_a_name():
  config = dataclasses.replace(
    config_of("gemma3"),
    tied=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
  )
  abstract = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  leaves, _ = weights_map._flatten(abstract)
  from model.families.family import GGUF, HUGGINGFACE_SANDWICH

  assert leaves.keys() == HUGGINGFACE_SANDWICH.keys() == GGUF.keys()
