"""Held-out loss and bits per byte against a document at a time."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx

from data import tokenized, tokenizer
from data.loader import Loader
from model.execution import Execution
from model.transformer import Transformer
from sharding.arrays import to_global
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from sharding.rules import tree_shardings
from tests.tolerances import tolerance
from tests.train import tiny_run
from train import held_out
from train.objective import lm_loss
from train.step import make_eval_step


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
  """A model, a store, and what a loop over its documents gives."""
  folder = tmp_path_factory.mktemp("data")
  tiny_run.write_data(folder)
  config = tiny_run.config(folder).model
  model = Transformer(config, rngs=nnx.Rngs(0))
  store = tokenized.TokenStore(folder / "held_out")
  tok = tokenizer.load(folder / "tokenizer.model")

  @jax.jit
  def log_probs(tokens, segment_ids):
    hidden = model(tokens[None, :-1], segment_ids=segment_ids[None, :-1])
    return jax.nn.log_softmax(model.logits(hidden)[0])

  nats, num_tokens, num_bytes = 0.0, 0, 0
  for i in range(len(store)):
    tokens = np.asarray(store.tokens[store.offsets[i] : store.offsets[i + 1]])
    size = len(tokens) - 1
    padded = np.zeros((2, 61), np.int32)
    padded[:, : size + 1] = tokens, np.ones(size + 1)
    found = np.asarray(log_probs(*padded), np.float64)
    nats -= found[np.arange(size), tokens[1:]].sum()
    num_tokens += size
    num_bytes += len(tok.decode(tokens.tolist()).encode())
  return model, store, nats, num_tokens, num_bytes


def evaluate(model, store, *, batch_size=2, num_batches=None, **kwargs):
  mesh, rules = make_mesh(MeshConfig(data=2, fsdp=1)), Rules()
  execution = Execution(mesh=mesh, rules=rules)
  loader = Loader(
    store,
    seq_len=40,
    global_batch_size=batch_size,
    shuffle=False,
    num_epochs=1,
    **kwargs,
  )
  shardings = tree_shardings(model, mesh, rules)
  return held_out.make_evaluate(
    make_eval_step(lm_loss(z_loss=1e-2), execution, shardings),
    loader,
    lambda batch: to_global(batch, mesh, rules),
    num_batches=num_batches,
  )(jax.device_put(model, shardings))


@pytest.mark.parametrize("change", [{}, {"packing": "none"}, {"batch_size": 4}])
def test_equals_a_loop_over_documents_however_packed(setup, change):
  model, store, nats, num_tokens, num_bytes = setup
  found = evaluate(model, store, **change)
  loss = nats / num_tokens
  bits = nats / math.log(2) / num_bytes
  np.testing.assert_allclose(
    [
      found["held_out_loss"],
      math.log(found["held_out_ppl"]),
      found["held_out_bits_per_byte"],
    ],
    [loss, loss, bits],
    **tolerance("loss"),
  )


def test_a_few_batches_take_their_share_of_the_bytes(setup):
  model, store, _, num_tokens, num_bytes = setup
  found = evaluate(model, store, num_batches=1)
  bits = found["held_out_loss"] / math.log(2) * num_tokens / num_bytes
  assert found["held_out_bits_per_byte"] == pytest.approx(bits)


def test_masked_stores_have_no_bits_per_byte(setup):
  model, store, *_ = setup
  mask = np.ones(len(store.tokens), np.uint8)
  masked = dataclasses.make_dataclass("Masked", [])()
  for name in ("tokens", "offsets", "num_bytes", "id"):
    setattr(masked, name, getattr(store, name))
  masked.mask = mask
  found = evaluate(model, [masked])
  assert "held_out_bits_per_byte" not in found
  assert found["held_out_loss"] > 0
