"""Costs against the real tree, the real program and XLA's own count."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.accounting import (
  flops_per_token,
  hardware_flops_per_token,
  kv_bytes_per_token,
  num_active_parameters,
  num_parameters,
)
from model.config import ModelConfig, Moe, Rope
from model.execution import Execution
from model.kv_cache import KVCache
from model.losses import cross_entropy
from model.transformer import Transformer
from tests.model.jaxprs import matmul_flops

CONFIG = ModelConfig(
  vocab_size=53,
  num_layers=3,
  embed_dim=20,
  num_heads=6,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=28,
  max_positions=64,
  rope=Rope(theta=1e4),
)


def closed_form(c: ModelConfig) -> int:
  """Counts the parameters by hand."""
  D, N, K, H, F = (
    c.embed_dim,
    c.num_heads,
    c.num_kv_heads,
    c.head_dim,
    c.mlp_dim,
  )
  norm = 2 * D if c.norm_bias else D
  wide = 2 if c.gated else 1
  layer = 2 * D * N * H + 2 * D * K * H + (wide + 1) * D * F
  layer += (N + 2 * K) * H if c.qkv_bias else 0
  layer += D if c.out_bias else 0
  layer += wide * F + D if c.mlp_bias else 0
  layer += 2 * H if c.qk_norm else 0
  layer += (4 if c.norm_placement == "sandwich" else 2) * norm
  ends = 0 if c.norm_placement == "post" else norm
  ends += (1 if c.tied else 2) * c.vocab_size * D
  return ends + c.num_layers * layer


def configs():
  """Each feature that has weights, on and off, in many combinations."""
  flags = ("qk_norm", "qkv_bias", "out_bias", "mlp_bias", "gated", "tied")
  placements = ("pre", "post", "sandwich", "parallel")
  rows = itertools.product((False, True), repeat=len(flags))
  for i, values in enumerate(rows):
    if i % 3 == 0:  # 22 of 64, with every value of every flag
      biased = i % 2 == 1
      yield dataclasses.replace(
        CONFIG,
        **dict(zip(flags, values, strict=True)),
        norm_placement=placements[i % 4],
        norm="layer" if biased else "rms",
        norm_bias=biased,
      )


def abstract_model(config: ModelConfig) -> Transformer:
  return jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def test_parameters_are_those_of_the_closed_form():
  for config in configs():
    assert num_parameters(config) == closed_form(config), config
    real = sum(x.size for x in jax.tree.leaves(abstract_model(config)))
    assert num_parameters(config) == real, config


def brute_force_keys(T, window, causal) -> float:
  ahead = np.arange(T)[:, None] - np.arange(T)[None, :]
  seen = np.ones((T, T), bool)
  if causal:
    seen &= ahead >= 0
  if window is not None:
    seen &= abs(ahead) < window
  return seen.sum() / T


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [1, 2, 7, 40])
def test_attention_is_counted_key_by_key(T, causal):
  for window in (1, 3, 7, 50):
    local = dataclasses.replace(
      CONFIG,
      causal=causal,
      window=window,
      layer_pattern=("local", "global"),
    )
    # Three layers: local, global, local.
    keys = 2 * brute_force_keys(T, window, causal)
    keys += brute_force_keys(T, None, causal)
    got = flops_per_token(local, T, backward=False)
    weights = 2 * (3 * (2 * 20 * 48 + 2 * 20 * 16 + 3 * 20 * 28) + 20 * 53)
    assert got == pytest.approx(weights + 4 * 48 * keys, rel=1e-12)
    full = flops_per_token(local, T, mask="full", backward=False)
    assert full == weights + 4 * 48 * 3 * T


def loss(model, tokens, execution):
  hidden = model(tokens, execution=execution)
  ones = jnp.ones(tokens.shape, jnp.float32)
  return cross_entropy(model, hidden, tokens, ones, execution=execution)[0]


def program_flops(config, tokens, execution) -> float:
  """Of the matmuls in the traced gradient, a token."""
  program = jax.make_jaxpr(jax.grad(loss), static_argnums=2)
  jaxpr = program(abstract_model(config), tokens, execution)
  return matmul_flops(jaxpr) / tokens.size


@pytest.mark.parametrize(
  "change",
  [
    {},
    {"num_kv_heads": 6, "tied": True},
    {"gated": False, "norm_placement": "sandwich", "qk_norm": True},
    {"norm_placement": "parallel", "num_kv_heads": 1},
  ],
  ids=str,
)
def test_flops_are_those_of_the_program(change):
  # Without a mask every matmul is whole: equal to the last multiply-add.
  config = dataclasses.replace(CONFIG, causal=False, **change)
  tokens = jax.ShapeDtypeStruct((2, 22), jnp.int32)
  want = flops_per_token(config, 22, mask="full")
  assert want == flops_per_token(config, 22, mask="exact")
  got = program_flops(config, tokens, Execution(attention="reference"))
  assert got == want


@pytest.mark.parametrize(
  ("remat", "every"),
  [("none", 1), ("dots", 1), ("block", 1), ("block", 3), ("nested", 1)],
)
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "parallel"])
def test_hardware_flops_are_those_of_the_program(remat, every, placement):
  config = dataclasses.replace(
    CONFIG, causal=False, num_layers=6, norm_placement=placement
  )
  tokens = jax.ShapeDtypeStruct((2, 22), jnp.int32)
  execution = Execution(remat=remat, remat_every=every)
  got = program_flops(config, tokens, execution)
  assert got == hardware_flops_per_token(config, 22, remat, every)


@pytest.mark.parametrize(
  "change",
  [
    {},
    {"num_kv_heads": 4, "tied": True},
    {"gated": False, "activation": "relu2"},
  ],
  ids=str,
)
def test_flops_are_within_5_percent_of_xla(change):
  config = ModelConfig(
    **{
      "vocab_size": 512,
      "num_layers": 2,
      "embed_dim": 256,
      "num_heads": 4,
      "num_kv_heads": 2,
      "head_dim": 64,
      "mlp_dim": 640,
      "max_positions": 128,
      "rope": Rope(theta=1e4),
      "causal": False,
    }
    | change
  )
  B, T = 2, 96
  execution = Execution(attention="reference")

  def naive_loss(model, tokens):
    # Unrolled: XLA counts the body of a loop once, however often it runs.
    model = model.unstacked()
    hidden = model(tokens, execution=execution)
    log_probs = jax.nn.log_softmax(model.logits(hidden, execution))
    return -jnp.sum(log_probs * jax.nn.one_hot(tokens, config.vocab_size))

  tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
  step = jax.jit(jax.grad(naive_loss))
  compiled = step.lower(abstract_model(config), tokens).compile()
  ratio = compiled.cost_analysis()["flops"] / (
    B * T * flops_per_token(config, T, mask="full")
  )
  assert abs(ratio - 1) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_bytes_are_those_of_the_cache(dtype):
  cache = jax.eval_shape(lambda: KVCache.zeros(CONFIG, 5, 11, dtype))
  real = sum(x.size * x.dtype.itemsize for x in (cache.k, cache.v))
  assert kv_bytes_per_token(CONFIG, dtype) * 5 * 11 == real


EXPERTS = Moe(num_experts=5, num_active=2, num_shared=1, bias_rate=0.0)


def test_active_and_all_parameters_of_experts():
  D, F, L = CONFIG.embed_dim, CONFIG.mlp_dim, CONFIG.num_layers
  config = dataclasses.replace(CONFIG, moe=EXPERTS)
  dense = closed_form(CONFIG)
  # The MLP is now the shared expert; a router has a matrix and a bias.
  router, expert = 5 * D + 5, 3 * D * F
  assert num_parameters(config) == dense + L * (router + 5 * expert)
  assert num_active_parameters(config) == dense + L * (router + 2 * expert)
  assert num_active_parameters(CONFIG) == num_parameters(CONFIG)
  more = L * 2 * (5 * D + 2 * expert)
  got = flops_per_token(config, 22, backward=False)
  assert got == flops_per_token(CONFIG, 22, backward=False) + more


@pytest.mark.parametrize("remat", ["none", "dots", "block", "nested"])
@pytest.mark.parametrize("placement", ["pre", "post", "parallel"])
def test_hardware_flops_of_experts_are_those_of_the_program(remat, placement):
  config = dataclasses.replace(
    CONFIG, causal=False, moe=EXPERTS, norm_placement=placement
  )
  tokens = jax.ShapeDtypeStruct((2, 22), jnp.int32)
  # This form multiplies every row with every expert, and so says how often
  # the matmuls of the experts run.
  execution = Execution(remat=remat, experts="reference")
  got = program_flops(config, tokens, execution)
  again = {"none": 0, "dots": 0, "block": 1, "nested": 2}[remat]
  forward = 2 * 3 * 2 * 3 * CONFIG.embed_dim * CONFIG.mlp_dim
  in_vain = (EXPERTS.num_experts - 1) * (3 + again) * forward
  assert got == hardware_flops_per_token(config, 22, remat) + in_vain
