"""Document scores against one forward pass a document, window by window."""

import jax.numpy as jnp
import numpy as np
import pytest

from data.tokenized import Example
from evals import perplexity
from model.execution import Execution
from sharding.axes import MeshConfig
from sharding.mesh import make_mesh
from tests.align import tiny

T = 8


@pytest.fixture(scope="module")
def documents():
  rng = np.random.default_rng(0)
  return [
    Example(str(i), rng.integers(1, tiny.VOCAB, n), num_bytes=3 * n)
    for i, n in enumerate((2, 9, 5, 10, 23, 3, 17))
  ]


@pytest.fixture(scope="module")
def execution():
  return Execution(mesh=make_mesh(MeshConfig(data=2, fsdp=1, tensor=2)))


def by_hand(model, documents):
  """log P of each token but the first, in windows that move by T / 2."""
  starts = [
    (document, begin)
    for document in documents
    for begin in range(0, len(document.tokens) - 1, T // 2)
  ]
  windows = np.zeros((len(starts), T + 1), np.int32)
  for row, (document, begin) in enumerate(starts):
    window = document.tokens[begin : begin + T + 1]
    windows[row, : len(window)] = window  # causal: padding harms no token
  logits = model.logits(model(jnp.array(windows[:, :-1])))
  logits = np.asarray(logits, np.float64)
  logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
  log_probs = np.take_along_axis(logits, windows[:, 1:, None], -1)[..., 0]
  result = {d.id: np.full(len(d.tokens), np.nan) for d in documents}
  for row, (document, begin) in enumerate(starts):
    for i, value in enumerate(log_probs[row], begin + 1):
      if i < len(document.tokens) and np.isnan(result[document.id][i]):
        result[document.id][i] = value
  return [result[d.id][1:] for d in documents]


def score(model, documents, execution):
  return perplexity.score(
    model, documents, seq_len=T, batch_size=4, execution=execution
  )


def test_windows_of_each_document(documents, execution):
  model = tiny.model()
  got = score(model, documents, execution)
  want = [-x for x in by_hand(model, documents)]
  np.testing.assert_allclose(got.nats, [w.sum() for w in want], rtol=1e-5)
  np.testing.assert_array_equal(got.tokens, [len(w) for w in want])
  total = np.concatenate(want)
  np.testing.assert_allclose(got.perplexity, np.exp(total.mean()), rtol=1e-5)
  num_bytes = sum(d.num_bytes for d in documents)
  np.testing.assert_allclose(
    got.bits_per_byte, total.sum() / np.log(2) / num_bytes, rtol=1e-5
  )


def test_masks(documents, execution):
  model, rng = tiny.model(), np.random.default_rng(1)
  masks = [rng.random(len(d.tokens)) < 0.5 for d in documents]
  masked = [
    Example(d.id, d.tokens, mask)
    for d, mask in zip(documents, masks, strict=True)
  ]
  got = score(model, masked, execution)
  want = [
    -x[mask[1:]].sum()
    for x, mask in zip(by_hand(model, documents), masks, strict=True)
  ]
  np.testing.assert_allclose(got.nats, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(got.tokens, [m[1:].sum() for m in masks])
