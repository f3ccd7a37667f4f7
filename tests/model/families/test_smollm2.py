"""SmolLM2-135M-Instruct against values recorded from transformers.

The recordings are in $ONEMESH_DATA/smollm2_reference; the same check without
them, live, is in tests/oracles/test_smollm2_live.py.
"""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.families import llama
from model.formats import gguf, gguf_tokenizer
from tests.model.families import smollm2
from tests.tolerances import tolerance

LENGTH = 96  # one compilation for all prompts


@pytest.fixture(scope="module")
def reference():
  if "ONEMESH_DATA" not in os.environ:
    pytest.skip("needs $ONEMESH_DATA with smollm2_reference")
  folder = pathlib.Path(os.environ["ONEMESH_DATA"]) / "smollm2_reference"
  return folder, json.loads((folder / "reference.json").read_text())


@jax.jit
def run(model, tokens):
  hidden = model(tokens)
  return hidden, model.logits(hidden)


def forward(ids):
  """Hidden states [T, D] and logits [T, V] of one text."""
  tokens = np.zeros((1, LENGTH), np.int32)
  tokens[0, : len(ids)] = ids
  hidden, logits = run(smollm2.model(), jnp.asarray(tokens))
  return np.asarray(hidden)[0, : len(ids)], np.asarray(logits)[0, : len(ids)]


def test_config_is_the_preset():
  _, config = gguf.load_config(smollm2.reader())
  assert config == llama.smollm2_135m()


def test_logits_and_greedy_tokens(reference):
  folder, recorded = reference
  for i, case in enumerate(recorded["cases"]):
    prompt, new = case["prompt_ids"], case["new_ids"]
    _, logits = forward(prompt + new)
    expected = np.load(folder / f"logits_last_{i}.npy")
    np.testing.assert_allclose(
      logits[len(prompt) - 1], expected, **tolerance("logits_parity_trained")
    )
    # Each token is the best after those before it: greedy decoding.
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new
    with np.load(folder / f"positions_{i}.npz") as positions:
      assert logits.argmax(-1).tolist() == positions["argmax"].tolist()
      log_sum = jax.nn.logsumexp(logits, axis=-1)
      np.testing.assert_allclose(
        log_sum,
        positions["logsumexp"],
        **tolerance("logits_parity_trained"),
      )


def test_plain_text_hidden_states_and_loss(reference):
  folder, _ = reference
  with np.load(folder / "plain_text.npz") as plain:
    hidden, logits = forward(plain["ids"].tolist())
    np.testing.assert_allclose(
      hidden, plain["h_last"], **tolerance("logits_parity_trained")
    )
    log_probs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    nll = -log_probs[np.arange(len(hidden) - 1), plain["ids"][1:]]
    np.testing.assert_allclose(
      nll, plain["nll"], **tolerance("logits_parity_trained")
    )


def test_tokenizer(reference):
  _, recorded = reference
  tokenizer = gguf_tokenizer.read(smollm2.reader())
  for case in recorded["cases"]:
    assert tokenizer.encode(case["text"]).ids == case["prompt_ids"]
    assert (
      tokenizer.decode(case["new_ids"], skip_special_tokens=False)
      == case["new_text"]
    )
  for sample in recorded["tokenizer_samples"]:
    assert tokenizer.encode(sample["text"]).ids == sample["ids"]
