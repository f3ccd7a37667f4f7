"""The models of the demo on held-out text and questions."""

from collections.abc import Sequence

import numpy as np

from data import tokenizer as tokenizer_lib
from data.chat import ChatTemplate
from data.loader import open_loader, open_store
from data.tokenized import Example
from data.tokenizer import Tokenizer
from evals import perplexity
from evals.ngram import NGram
from evals.perplexity import Scores
from examples.demo.questions import Question
from model.execution import Execution
from model.transformer import Transformer
from serve.config import Sampling
from serve.generate import Completion, generate
from train.run_config import PretrainConfig

_MAX_ANSWER = 32  # tokens
_BEAMS = 3
_ROWS = 64  # answered together


def held_out_texts(config: PretrainConfig) -> list[Example]:
  """The held-out store of a pretraining run."""
  tokenizer = tokenizer_lib.load(config.data.tokenizer)
  store = open_store(config.held_out.path, tokenizer)
  return [
    Example(
      store.id(i),
      store.tokens[store.offsets[i] : store.offsets[i + 1]],
      num_bytes=int(store.num_bytes[i]),
    )
    for i in range(len(store))
  ]


def ngram_nats(config: PretrainConfig, texts: Sequence[Example]) -> np.ndarray:
  """Nats of documents under a 3-gram model of the very tokens trained on.

  Args:
    config: of the run; its first `num_steps` batches are read again.
    texts: to score.
  """
  loader = open_loader(config.data, tokenizer_lib.load(config.data.tokenizer))
  # Read twice, a text still counts once: smoothing goes by how often things
  # occur in the language, not in the epochs.
  sequences = {}
  for step in range(config.num_steps):
    batch, _ = loader.batch(step)
    for tokens, targets, segments in zip(
      batch["tokens"], batch["targets"], batch["segment_ids"], strict=True
    ):
      real = segments > 0
      starts = np.flatnonzero(np.diff(segments[real], prepend=0))
      for piece in np.split(np.flatnonzero(real), starts[1:]):
        sequence = np.append(tokens[piece[0]], targets[piece])
        sequences[sequence.tobytes()] = sequence
  model = NGram(list(sequences.values()), vocab_size=config.model.vocab_size)
  return np.array([-model.log_probs(d.tokens).sum() for d in texts])


def answer_examples(
  questions: Sequence[Question],
  answers: Sequence[str],
  tokenizer: Tokenizer,
  template: ChatTemplate,
) -> list[Example]:
  """Conversations in which only the answers count."""
  examples = []
  for question, answer in zip(questions, answers, strict=True):
    turn = {"role": "assistant", "content": answer}
    ids, mask = template.encode(tokenizer, [*question.messages, turn])
    examples.append(Example(question.id, ids, mask))
  return examples


def score(
  model: Transformer,
  examples: Sequence[Example],
  *,
  seq_len: int,
  execution: Execution,
) -> Scores:
  """Nats and tokens of each document or answer."""
  return perplexity.score(
    model, examples, seq_len=seq_len, batch_size=16, execution=execution
  )


def answer(
  model: Transformer,
  questions: Sequence[Question],
  tokenizer: Tokenizer,
  template: ChatTemplate,
  execution: Execution,
) -> list[Completion]:
  """The likeliest answers that a beam search finds."""
  stop = tokenizer.special_tokens["<|end|>"]
  prompts = [template.encode_prompt(tokenizer, q.messages) for q in questions]
  sampling = Sampling(
    max_new_tokens=_MAX_ANSWER,
    num_beams=_BEAMS,
    temperature=0.0,
    stop_ids=(stop,),
  )
  # Of like length together: short prompts do not wait for long ones.
  order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
  answers = {}
  for rows in np.array_split(order, -(-len(order) // _ROWS)):
    completions = generate(
      model,
      [prompts[i] for i in rows],
      sampling,
      execution=execution,
      tokenizer=tokenizer,
    )
    answers |= zip(rows, (some[0] for some in completions), strict=True)
  return [answers[i] for i in range(len(prompts))]
