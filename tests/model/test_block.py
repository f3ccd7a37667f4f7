"""Where norms stand, and where the branches join."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import rope
from model.attention import View
from model.dropout import row_keys
from model.execution import Execution
from tests.model.tiny import make
from tests.tolerances import tolerance

B, T = 2, 5


def transcribed(placement, x, attention, mlp, norms):
  """The formula of each placement, as papers write it."""
  first, second, first_post, second_post = norms
  if placement == "pre":  # GPT-2, Llama
    h = x + attention(first(x))
    return h + mlp(second(h))
  if placement == "post":  # arXiv:1706.03762
    h = first(x + attention(x))
    return second(h + mlp(h))
  if placement == "sandwich":  # Gemma 2
    h = x + first_post(attention(first(x)))
    return h + second_post(mlp(second(h)))
  if placement == "parallel":  # GPT-J, PaLM
    return x + attention(first(x)) + mlp(second(x))
  raise ValueError(placement)


def arguments(config):
  positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
  angles = (rope.angles(config.rope, config.head_dim, positions),)
  return dict(
    view=View(angles, positions, segment_ids=None),
    kind=0,
    cache=None,
    execution=Execution(),
  )


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "parallel"])
def test_placement(placement, norm):
  model = make(norm_placement=placement, norm=norm, norm_bias=norm == "layer")
  block = jax.tree.map(lambda x: x[1], model.layers)
  x = np.random.default_rng(0).normal(size=(B, T, 20)).astype("float32")
  shared = arguments(model.config)

  def attention(x):
    return block.attention(x, dropout_keys_B=None, **shared)[0]

  names = (
    "attention_norm",
    "mlp_norm",
    "attention_post_norm",
    "mlp_post_norm",
  )
  norms = [getattr(block, name, None) for name in names]
  assert (norms[3] is not None) == (placement == "sandwich")
  want = transcribed(
    placement, x, attention, lambda x: block.mlp(x, Execution()), norms
  )
  got, new, stats = block(x, dropout_keys_B=None, **shared)
  assert new is None and stats == {}
  np.testing.assert_allclose(got, want, **tolerance("norm"))


def test_residual_dropout_thins_both_branches_and_not_the_stream():
  """With the branches' weights at 0, dropout must change nothing."""
  model = make(residual_dropout=0.5)
  block = jax.tree.map(lambda x: x[0], model.layers)
  x = np.random.default_rng(0).normal(size=(B, T, 20)).astype("float32")
  keys = row_keys(jax.random.key(0), jnp.arange(B))
  run = lambda block: np.asarray(
    block(x, dropout_keys_B=keys, **arguments(model.config))[0]
  )
  silent = lambda linear: linear.w.set_value(0 * linear.w[...])
  outputs = [run(block)]
  silent(block.mlp.down)
  attention_only = run(block)
  # Where dropout hit, the stream passes as it came in.
  hit = attention_only == x
  assert 0.3 < hit.mean() < 0.7
  silent(block.attention.out)
  np.testing.assert_array_equal(run(block), x)
  assert (outputs[0] == x).mean() < 0.4  # Both hit: one in four.
