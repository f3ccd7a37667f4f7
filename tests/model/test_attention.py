"""The layer around the kernel, transcribed in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import rope
from model.attention import View
from model.config import Rope
from model.execution import Execution
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from tests.model.tiny import CONFIG, make
from tests.pallas_kernels.flash_attention import oracle
from tests.tolerances import tolerance

B, T, D = 2, 7, CONFIG.embed_dim


def inputs():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(B, T, D)).astype("float32")
  positions = np.array([[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 0]], np.int32)
  segments = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 2, 0]], np.int32)
  return x, positions, segments


def first_layer(model):
  return jax.tree.map(lambda x: x[0], model.layers).attention


def transcribed(layer, config, x, seen, cos, sin):
  """Literally what the articles write, head dims last."""
  array = lambda p: np.float64(p[...])

  def project(linear, x):
    y = np.einsum("btd,dnh->btnh", x, array(linear.w))
    return y if linear.b is None else y + array(linear.b)

  def norm(scale, x):
    rms = np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
    return x / rms * (array(scale) + float(config.norm_offset))

  def rotate(x):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos[:, :, None], sin[:, :, None]  # the same for all heads
    return np.concatenate([a * c - b * s, b * c + a * s], -1)

  q, k, v = (project(p, np.float64(x)) for p in (layer.q, layer.k, layer.v))
  if config.qk_norm:
    q, k = norm(layer.q_norm.scale, q), norm(layer.k_norm.scale, k)
  if config.rope is not None:
    q, k = rotate(q), rotate(k)
  scale = config.attention_scale or config.head_dim**-0.5
  y = oracle.attention(
    q, k, v, q, seen, scale=scale, soft_cap=config.attention_softcap
  )["out"]
  out = np.einsum("btnh,nhd->btd", y, array(layer.out.w))
  return out if layer.out.b is None else out + array(layer.out.b)


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"rope": None, "causal": False, "num_kv_heads": 4},
    {"qk_norm": True, "qkv_bias": True, "out_bias": True, "num_kv_heads": 1},
    {"attention_scale": 0.3, "attention_softcap": 1.5, "head_dim": 10},
    {"qk_norm": True, "norm_offset": True, "norm_eps": 0.3},
  ],
  ids=str,
)
def test_layer(changes):
  model = make(**changes)
  config, layer = model.config, first_layer(model)
  x, positions, segments = inputs()
  angles = ()
  cos = sin = None
  if config.rope is not None:
    angles = (rope.angles(config.rope, config.head_dim, positions),)
    cos, sin = map(np.float64, angles[0])
  y, new = layer(
    x,
    View(angles, positions, segment_ids=jnp.asarray(segments)),
    kind=0,
    cache=None,
    dropout_keys_B=None,
    execution=Execution(),
  )
  assert new is None
  seen = segments[:, :, None] == segments[:, None, :]
  seen &= segments[:, None, :] != 0
  if config.causal:
    seen &= np.tri(T, dtype=bool)
  want = transcribed(layer, config, x, seen, cos, sin)
  np.testing.assert_allclose(y, want, **tolerance("attention"))


@pytest.mark.parametrize("traced", [False, True])
def test_each_kind_has_its_window_and_its_angles(traced):
  model = make(
    layer_pattern=("local", "global"), window=2, rope_local=Rope(theta=7.0)
  )
  config, layer = model.config, first_layer(model)
  x, _, _ = inputs()
  positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
  pairs = tuple(
    rope.angles(r, config.head_dim, jnp.asarray(positions))
    for r in (config.rope_local, config.rope)
  )

  def run(kind):
    return layer(
      x,
      View(angles=pairs, positions=positions, segment_ids=None),
      kind=kind,
      cache=None,
      dropout_keys_B=None,
      execution=Execution(),
    )[0]

  distance = np.arange(T)[:, None] - np.arange(T)
  for kind, window in ((0, 2), (1, T)):
    seen = np.broadcast_to((distance >= 0) & (distance < window), (B, T, T))
    cos, sin = map(np.float64, pairs[kind])
    want = transcribed(layer, config, x, seen, cos, sin)
    got = run(jnp.int32(kind) if traced else kind)
    np.testing.assert_allclose(got, want, **tolerance("attention"))


def test_refuses_to_part_heads_from_their_keys():
  rules = Rules(kv_heads=(), vocab=())
  mesh = make_mesh(MeshConfig(tensor=2), devices=jax.devices()[:2])
  execution = Execution(attention="tpu", mesh=mesh, rules=rules)
  tokens = jnp.ones((1, 8), jnp.int32)
  with pytest.raises(ValueError, match=r"rules.kv_heads=\(\) part query heads"):
    make().unstacked()(tokens, execution=execution)
