"""Sampling and beam search against transformers, run side by side."""

import numpy as np
import pytest

from model.formats import huggingface
from serve import sampler
from serve.config import Sampling
from serve.generate import generate
from tests.tolerances import tolerance

pytestmark = [
  pytest.mark.oracle,
  # Of torch and transformers, about themselves.
  pytest.mark.filterwarnings("default"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
STOPS = (7, 11, 23, 31)


def processors(model, s: Sampling):
  """What `transformers` makes of the settings, in its order."""
  config = transformers.GenerationConfig(
    do_sample=True,
    temperature=s.temperature,
    top_k=s.top_k,
    top_p=s.top_p,
    min_p=s.min_p or None,
  )
  return model._get_logits_processor(
    generation_config=config,
    logits_processor=transformers.LogitsProcessorList(),
  )


def tiny_llama():
  """Peaked enough that beams part."""
  return transformers.LlamaConfig(
    vocab_size=37,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=40,
    max_position_embeddings=64,
    initializer_range=0.4,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=36,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
  )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  """The same weights in transformers and here."""
  torch.manual_seed(0)
  theirs = transformers.LlamaForCausalLM(tiny_llama()).eval()
  folder = tmp_path_factory.mktemp("llama")
  theirs.save_pretrained(folder)
  return theirs, huggingface.load(folder)


@pytest.mark.parametrize(
  "s",
  [
    Sampling(temperature=0.7),
    Sampling(top_k=5),
    Sampling(top_p=0.8),
    Sampling(min_p=0.1),
    Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
    Sampling(temperature=0.3, top_k=20, top_p=0.5),
  ],
)
def test_truncation(models, s):
  """The same tokens stay, with the same probabilities."""
  rng = np.random.default_rng(0)
  logits = rng.normal(0, 3, (40, 211)).astype(np.float32)
  ids = torch.zeros((40, 1), dtype=torch.long)
  theirs = (
    processors(models[0], s)(ids, torch.from_numpy(logits)).softmax(-1).numpy()
  )
  cut = sampler.truncate(logits, sampler.knobs([s] * 40))
  ours = torch.from_numpy(np.array(cut)).softmax(-1).numpy()
  np.testing.assert_array_equal(ours > 0, theirs > 0)
  np.testing.assert_allclose(ours, theirs, **tolerance("elementwise"))
  cuts = s.top_k or s.top_p < 1 or s.min_p
  assert (theirs > 0).all() == (not cuts)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("stops", [STOPS, ()])
def test_beam_search(models, penalty, stops):
  theirs, ours = models
  sampling = Sampling(
    max_new_tokens=9,
    temperature=0.0,
    num_beams=4,
    num_samples=3,
    length_penalty=penalty,
    stop_ids=stops,
  )
  answers = generate(ours, PROMPTS, sampling)
  for prompt, best in zip(PROMPTS, answers, strict=True):
    out = theirs.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
      do_sample=False,
      max_new_tokens=9,
      num_beams=4,
      num_return_sequences=3,
      length_penalty=penalty,
      early_stopping="never",
      eos_token_id=list(stops) or None,
      pad_token_id=36,
      return_dict_in_generate=True,
      output_scores=True,
    )
    for answer, ids, score in zip(
      best, out.sequences, out.sequences_scores, strict=True
    ):
      new = ids[len(prompt) :].tolist()
      assert answer.ids == new[: len(answer.ids)]
      assert set(new[len(answer.ids) :]) <= {36}  # padding
      np.testing.assert_allclose(
        sum(answer.log_probs) / len(answer.ids) ** penalty,
        float(score),
        **tolerance("gradient"),
      )
  lengths = {len(answer.ids) for best in answers for answer in best}
  # A penalty of 2 favours length over everything.
  assert (min(lengths) < 9) == bool(stops and penalty < 2)


def test_greedy(models):
  """Ragged prompts in one batch: ours padded right, theirs left."""
  theirs, ours = models
  width = max(map(len, PROMPTS))
  pad = lambda p, value: [0] * (width - len(p)) + value
  out = theirs.generate(
    torch.tensor([pad(p, p) for p in PROMPTS]),
    attention_mask=torch.tensor([pad(p, [1] * len(p)) for p in PROMPTS]),
    do_sample=False,
    max_new_tokens=12,
  )
  answers = generate(ours, PROMPTS, Sampling(max_new_tokens=12, temperature=0))
  assert [a.ids for [a] in answers] == out[:, width:].tolist()
