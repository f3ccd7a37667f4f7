"""SmolLM2-135M-Instruct against transformers, run side by side."""

import jax
import numpy as np
import pytest

from model.formats import gguf_tokenizer, huggingface
from tests.model.families import smollm2
from tests.model.families.test_smollm2 import forward
from tests.tolerances import tolerance

pytestmark = [
  pytest.mark.oracle,
  # Of torch and transformers, about themselves.
  pytest.mark.filterwarnings("default"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS = (
  "What is the capital of France?",
  "Name three colours, separated by commas.",
)
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def theirs():
  """Transformers' own reading of the GGUF file."""
  path = smollm2.path()
  return transformers.AutoModelForCausalLM.from_pretrained(
    path.parent,
    gguf_file=path.name,
    dtype=torch.float32,
    attn_implementation="eager",
  ).eval()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  """Ours, opened by transformers."""
  folder = tmp_path_factory.mktemp("tokenizer")
  gguf_tokenizer.save(smollm2.reader(), folder)
  return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_greedy_tokens(theirs, tokenizer, prompt):
  text = tokenizer.apply_chat_template(
    [{"role": "user", "content": prompt}],
    tokenize=False,
    add_generation_prompt=True,
  )
  ids = tokenizer(text, add_special_tokens=False)["input_ids"]
  with torch.no_grad():
    full = theirs.generate(
      torch.tensor([ids]),
      attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
      do_sample=False,
      max_new_tokens=NEW_TOKENS,
      pad_token_id=tokenizer.pad_token_id,
    )
    expected = theirs(full).logits[0].numpy()
  full = full[0].tolist()
  assert len(full) > len(ids)
  _, logits = forward(full)
  np.testing.assert_allclose(
    logits, expected, **tolerance("logits_parity_trained")
  )
  assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == full[len(ids) :]


def test_weights_are_bitwise_theirs(theirs, tmp_path):
  huggingface.export(smollm2.model(), tmp_path / "out", family="llama")
  state = theirs.state_dict()
  checkpoint = huggingface.safetensors.Checkpoint(tmp_path / "out")
  assert checkpoint.names() == set(state) - {"lm_head.weight"}
  for name in checkpoint.names():
    np.testing.assert_array_equal(checkpoint.read(name), state[name].numpy())
  again = huggingface.load(tmp_path / "out")
  for a, b in zip(
    jax.tree.leaves(again), jax.tree.leaves(smollm2.model()), strict=True
  ):
    np.testing.assert_array_equal(a, b)
