"""The decoding form computes what the model computes."""

import jax
import numpy as np
import pytest

from serve import weights
from serve.config import Sampling
from serve.generate import generate
from tests.model import tiny
from tests.tolerances import tolerance


@pytest.mark.parametrize("cores", [2, 3])
@pytest.mark.parametrize(
  "changes",
  [{}, dict(tied=True, out_bias=True, mlp_bias=True, logit_scale=0.5)],
)
def test_same_logits(changes, cores, monkeypatch):
  model = tiny.make(**changes)
  monkeypatch.setattr(weights.os, "cpu_count", lambda: cores)
  split = weights.for_decoding(model)
  assert len(split.layers[0].mlp.down.parts) == cores
  run = jax.jit(lambda model, tokens: model.logits(model(tokens)))
  tokens = tiny.tokens(2, 9)
  np.testing.assert_allclose(
    run(split, tokens), run(model, tokens), **tolerance("matmul")
  )


def test_generates_the_same(monkeypatch):
  model = tiny.make()
  sampling = Sampling(max_new_tokens=5, num_samples=2)
  monkeypatch.setattr(weights.os, "cpu_count", lambda: 2)
  [wanted] = generate(model, [[1, 2, 3]], sampling)
  [got] = generate(weights.for_decoding(model), [[1, 2, 3]], sampling)
  assert [a.ids for a in got] == [a.ids for a in wanted]


def test_more_cores_than_outputs(monkeypatch):
  monkeypatch.setattr(weights.os, "cpu_count", lambda: 64)
  model = tiny.make()
  split = weights.for_decoding(model)
  assert len(split.layers[0].attention.out.parts) == tiny.CONFIG.embed_dim
