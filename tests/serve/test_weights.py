"""The decoding form computes what the model computes."""

import jax
import numpy as np
import pytest

from serve.config import Sampling
from serve.generate import generate
from serve.weights import for_decoding
from tests.model import tiny
from tests.tolerances import tolerance


@pytest.mark.parametrize(
  "changes",
  [
    {},
    dict(qkv_bias=True, qk_norm=True),
    dict(tied=True, out_bias=True, mlp_bias=True, logit_scale=0.5),
    dict(gated=False, activation="gelu"),
  ],
)
def test_same_logits(changes):
  model = tiny.make(**changes)
  decoder = for_decoding(model)
  run = jax.jit(lambda model, tokens: model.logits(model(tokens)))
  tokens = tiny.tokens(2, 9)
  np.testing.assert_allclose(
    run(decoder, tokens), run(model, tokens), **tolerance("matmul")
  )


def test_projects_once_and_leaves_the_model_alone():
  model = tiny.make()
  attention = for_decoding(model).layers[0].attention
  heads = tiny.CONFIG.num_heads + 2 * tiny.CONFIG.num_kv_heads
  assert attention.qkv.w.shape[1] == heads
  assert not hasattr(attention, "q")
  assert hasattr(model.layers.attention, "q")


def test_generates_the_same():
  model = tiny.make()
  sampling = Sampling(max_new_tokens=5, num_samples=2)
  [wanted] = generate(model, [[1, 2, 3]], sampling)
  [got] = generate(for_decoding(model), [[1, 2, 3]], sampling)
  assert [a.ids for a in got] == [a.ids for a in wanted]
