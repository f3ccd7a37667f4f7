"""Generation against the full forward pass, token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import Rope
from model.execution import Execution
from model.precision import POLICIES
from serve import decode
from serve.config import Sampling
from serve.generate import generate, stream
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from sharding.rules import tree_shardings
from tests.model import tiny
from tests.serve.test_text import Bytes

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]]
GREEDY = Sampling(max_new_tokens=7, temperature=0.0)

KINDS = {
  "grouped queries": {},
  "sliding window": dict(layer_pattern=("local",), window=4),
  "local and global": dict(
    layer_pattern=("local", "global"),
    window=5,
    rope_local=Rope(theta=10.0),
    num_layers=4,
  ),
  "soft-caps, tied": dict(
    attention_softcap=2.0, logit_softcap=3.0, tied=True, qk_norm=True
  ),
  "experts": dict(moe=tiny.MOE),
}


@pytest.fixture(scope="module")
def model():
  return tiny.make()


@jax.jit
def full(model, tokens_BT):
  """Log-probabilities without a cache, [B, T, V]."""
  return jax.nn.log_softmax(model.logits(model(tokens_BT)))


def check(model, prompt, completion):
  """Each token is the likeliest after those before, by the full forward."""
  ids = prompt + completion.ids
  padded = np.zeros((1, 24), np.int32)
  padded[0, : len(ids)] = ids
  log_probs = full(model, padded)[0, len(prompt) - 1 : len(ids) - 1]
  np.testing.assert_array_equal(log_probs.argmax(axis=1), completion.ids)
  np.testing.assert_allclose(
    completion.log_probs, log_probs.max(axis=1), rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize("kind", KINDS)
def test_cached_equals_full_forward(kind):
  """Ragged prompts, longer than the window; layers stacked, and apart."""
  model = tiny.make(**KINDS[kind])
  answers = generate(model, PROMPTS, GREEDY)
  for prompt, [answer] in zip(PROMPTS, answers):
    assert len(answer.ids) == 7 and answer.finish_reason == "length"
    check(model, prompt, answer)
  if kind == "local and global":
    apart = generate(model.unstacked(), PROMPTS, GREEDY)
    assert [a.ids for [a] in apart] == [a.ids for [a] in answers]


def test_batched_equals_single(model):
  """Greedy and drawn: a row does not see its neighbours."""
  drawn = Sampling(max_new_tokens=5, num_samples=2, top_p=0.9, seed=11)
  for sampling in (GREEDY, drawn):
    together = generate(model, PROMPTS, sampling)
    for prompt, answers in zip(PROMPTS, together):
      [alone] = generate(model, [prompt], sampling)
      assert [a.ids for a in alone] == [a.ids for a in answers]
  first, second = together[0]
  assert first.ids != second.ids
  assert generate(model, PROMPTS, dataclasses.replace(drawn, seed=12)) != (
    together
  )


def test_nothing_is_compiled_twice(model):
  """New prompts, lengths, settings and stops in the buckets of the old."""
  run = lambda prompts, **settings: generate(
    model, prompts, Sampling(max_new_tokens=13, **settings), tokenizer=Bytes()
  )
  one = lambda prompt: list(
    stream(model, prompt, Sampling(max_new_tokens=9), tokenizer=Bytes())
  )
  jitted = decode._read, decode._first, decode.decode
  sizes = lambda: [f._cache_size() for f in jitted]
  run([[1, 2, 3], [4], [5]], temperature=0.0)
  one([5] * 9)
  before = sizes()
  run([[1] * 13, [4, 5], [6], [7]], temperature=0.7, top_k=3, seed=5)
  run([[2], [3], [4]], top_p=0.5, stop_ids=(4, 5, 6), stop_strings=("\x07",))
  one([6] * 4)
  assert sizes() == before
  run([[1]] * 9, temperature=0.0)  # another bucket: the count does count
  assert sizes() == [n + 1 for n in before]


def test_stop_ids(model):
  """The stop token ends the ids; its text is left out."""
  [[free]] = generate(model, PROMPTS[:1], GREEDY, tokenizer=Bytes())
  stop = free.ids[3]
  n = free.ids.index(stop) + 1
  sampling = dataclasses.replace(GREEDY, stop_ids=(stop, 36))
  answers = generate(model, PROMPTS, sampling, tokenizer=Bytes())
  [answer] = answers[0]
  assert answer.ids == free.ids[:n] and answer.finish_reason == "stop"
  assert len(answer.log_probs) == n
  assert answer.text == Bytes().decode(answer.ids[:-1])


def test_stop_string_across_tokens(model):
  """Two tokens make it; the ids end with the second."""
  [[free]] = generate(model, PROMPTS[2:], GREEDY, tokenizer=Bytes())
  stop = free.text[2:4]
  at = free.text.index(stop)
  sampling = dataclasses.replace(GREEDY, stop_strings=(stop, "no such"))
  answers = generate(model, PROMPTS, sampling, tokenizer=Bytes())
  [answer] = answers[2]
  assert answer.finish_reason == "stop"
  assert answer.text == free.text[:at] and answer.ids == free.ids[: at + 2]


def test_stream_is_the_text(model):
  sampling = Sampling(max_new_tokens=9, seed=3)
  [[whole]] = generate(model, PROMPTS[:1], sampling, tokenizer=Bytes())
  pieces = []

  def collect():
    completion = yield from stream(
      model, PROMPTS[0], sampling, tokenizer=Bytes()
    )
    assert completion == whole

  pieces = list(collect())
  assert "".join(pieces) == whole.text and len(pieces) == 9
  stop = whole.text[4:6]
  sampling = dataclasses.replace(sampling, stop_strings=(stop,))
  cut = stream(model, PROMPTS[0], sampling, tokenizer=Bytes())
  assert "".join(cut) == whole.text[: whole.text.index(stop)]


def test_beams(model):
  """As many beams as there are answers of two tokens find the best one."""
  sampling = Sampling(
    max_new_tokens=2, temperature=0.0, num_beams=37, num_samples=3
  )
  answers = generate(model, PROMPTS[:2], sampling)
  V = tiny.CONFIG.vocab_size
  for prompt, best in zip(PROMPTS, answers):
    rows = np.array([prompt + [v] for v in range(V)], np.int32)
    log_probs = full(model, rows)
    first = log_probs[0, -2]
    total = (first[:, None] + log_probs[:, -1]).reshape(-1)
    order = np.argsort(-total)[:3]
    assert [a.ids for a in best] == [[i // V, i % V] for i in order.tolist()]
    np.testing.assert_allclose(
      [sum(a.log_probs) for a in best], total[order], rtol=1e-5, atol=1e-5
    )


def test_the_last_position_ends_an_answer(model):
  prompt = [1] * (tiny.CONFIG.max_positions - 3)
  [[answer]] = generate(model, [prompt], GREEDY)
  assert len(answer.ids) == 3 and answer.finish_reason == "length"


@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_mesh(axis):
  """A sharded model on 2 devices gives the tokens of one, compiled once."""
  # 37 pieces of vocabulary do not divide by 2.
  model = tiny.make(vocab_size=38)
  shape = MeshConfig(**{"fsdp": 1} | {axis: 2})
  mesh = make_mesh(shape, devices=jax.devices()[:2])
  execution = Execution(mesh=mesh)
  sharded = jax.device_put(model, tree_shardings(model, mesh, Rules()))
  ids = lambda answers: [[a.ids for a in row] for row in answers]
  drawn = Sampling(max_new_tokens=6, num_samples=2, seed=1)
  for sampling in (GREEDY, drawn):
    single = generate(model, PROMPTS, sampling)
    split = generate(sharded, PROMPTS, sampling, execution=execution)
    assert ids(split) == ids(single)
  before = decode.decode._cache_size()
  stops = dataclasses.replace(drawn, stop_strings=("no such",))
  generate(sharded, PROMPTS, stops, execution=execution, tokenizer=Bytes())
  assert decode.decode._cache_size() == before


@pytest.mark.parametrize(
  ("prompts", "message"),
  [
    ([[1], []], "prompt 1 is empty"),
    ([[1] * 64], "prompt 0 has 64 tokens.*max_positions=64"),
    ([[1, 37]], "ids from 1 to 37, outside of model.vocab_size=37"),
    ([[-1]], "ids from -1 to -1"),
  ],
)
def test_bad_prompts(model, prompts, message):
  with pytest.raises(ValueError, match=message):
    generate(model, prompts, GREEDY)


def test_bad_calls(model):
  sampling = dataclasses.replace(GREEDY, stop_strings=("x",))
  with pytest.raises(ValueError, match="pass tokenizer="):
    generate(model, PROMPTS, sampling)
  with pytest.raises(ValueError, match="num_samples=1"):
    stream(model, [1], Sampling(num_samples=2), tokenizer=Bytes())
  assert generate(model, [], GREEDY) == []


def test_bf16_cache_equals_full_forward(model):
  """The cache keeps what attention would have multiplied: no rounding more."""
  execution = Execution(precision=POLICIES["bf16_operands"])
  [[answer]] = generate(model, PROMPTS[2:], GREEDY, execution=execution)
  ids = jnp.array([PROMPTS[2] + answer.ids])

  @jax.jit
  def full(model):
    hidden = model(ids, execution=execution)
    return jax.nn.log_softmax(model.logits(hidden, execution))

  log_probs = full(model)
  wanted = log_probs[0, np.arange(11, 18), answer.ids]
  np.testing.assert_allclose(answer.log_probs, wanted, rtol=1e-2, atol=1e-2)
