"""The decoding form computes what the model computes."""

import jax
import numpy as np
import pytest

from serve import weights
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
    dict(moe=tiny.MOE),
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


def test_a_row_of_whole_pages_gets_a_head_of_zeros(monkeypatch):
  model = tiny.make(qkv_bias=True)
  heads = tiny.CONFIG.num_heads + 2 * tiny.CONFIG.num_kv_heads
  row = 4 * heads * tiny.CONFIG.head_dim
  for page, spare in ((row, 1), (row // 2, 1), (2 * row, 0)):
    monkeypatch.setattr(weights, "_PAGE", page)
    decoder = for_decoding(model)
    qkv = decoder.layers[0].attention.qkv
    assert qkv.w.shape[1] == qkv.b.shape[0] == heads + spare
    assert not qkv.w[...][:, heads:].any()
    tokens = tiny.tokens(2, 9)
    np.testing.assert_allclose(
      decoder.logits(decoder(tokens)),
      model.logits(model(tokens)),
      **tolerance("matmul"),
    )


def test_generates_the_same():
  model = tiny.make()
  sampling = Sampling(max_new_tokens=5, num_samples=2)
  [wanted] = generate(model, [[1, 2, 3]], sampling)
  [got] = generate(for_decoding(model), [[1, 2, 3]], sampling)
  assert [a.ids for a in got] == [a.ids for a in wanted]
