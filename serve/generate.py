"""Continues prompts: draws, beams, stop tokens and strings, streaming.

    [[answer]] = generate(model, [ids], Sampling(max_new_tokens=64),
                          tokenizer=tokenizer)
    for piece in stream(model, ids, Sampling(), tokenizer=tokenizer):
      print(piece, end="", flush=True)

Prompts of any lengths share a batch: they are padded on the right, and each
row writes its keys and values at its own positions. Shapes are rounded up to
powers of two and settings are arrays, so that calls share compiled code.
On a CPU give the model in the form of `serve.weights.for_decoding`.
"""

import dataclasses
import zlib
from collections.abc import Generator, Sequence

import jax
import numpy as np

from model.execution import Execution
from model.transformer import Transformer
from serve import decode, sampler
from serve.config import Sampling
from serve.text import TextStream

# Tokens decoded between two looks of the host for a stop string.
TOKENS_A_LOOK = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """One continuation of a prompt.

  Attributes:
    ids: its tokens; the token that stopped it is the last.
    text: decoded, without stop token and stop string; None without tokenizer.
    log_probs: of each token, under the model itself: before temperature and
      truncation.
    finish_reason: "stop": a stop token or string; "length": it reached
      `max_new_tokens` or the model's last position.
  """

  ids: list[int]
  text: str | None
  log_probs: list[float]
  finish_reason: str


def generate(
  model: Transformer,
  prompts: Sequence[Sequence[int]],
  sampling: Sampling,
  *,
  execution: Execution = Execution(),
  tokenizer=None,
) -> list[list[Completion]]:
  """Continues each prompt `sampling.num_samples` times.

  Args:
    model: the weights; sharded over `execution.mesh` if that is set.
    prompts: token ids, of any lengths.
    sampling: what to draw and when to stop.
    execution: how to run.
    tokenizer: has `decode(ids) -> str`; needed for texts and stop strings.

  Returns:
    For each prompt its completions; those of a beam search best first.

  Raises:
    ValueError: a prompt is empty, too long, or has ids outside of the
      vocabulary; stop strings without tokenizer.
  """
  if not prompts:
    return []
  run = _Run(model, prompts, sampling, execution, tokenizer)
  if sampling.num_beams > 1:
    return run.search()
  state = run.start()
  if not sampling.stop_strings:
    return run.completions(run.decode(state, sampling.max_new_tokens))
  streams = run.streams()
  read = 0
  while True:
    ids, counts = jax.device_get((state.ids, state.counts))
    stopped = np.zeros(len(counts), bool)
    for r, text in enumerate(streams):
      for token in ids[r, read : counts[r]]:
        if not text.stopped and token not in sampling.stop_ids:
          text.add(token)
      stopped[r] = text.stopped
    read = int(state.count)
    if (stopped[: run.num_rows] | np.asarray(state.done)[: run.num_rows]).all():
      return run.completions(state, streams)
    state = run.decode(state, read + TOKENS_A_LOOK, stopped)


def stream(
  model: Transformer,
  prompt: Sequence[int],
  sampling: Sampling,
  *,
  execution: Execution = Execution(),
  tokenizer,
) -> Generator[str, None, Completion]:
  """Continues one prompt and yields its text as it grows.

  Pieces end at the borders of characters; what may be the beginning of a stop
  string is held back until it is not. Arguments and errors as `generate`.

  Returns:
    The whole completion (the value of `yield from`).
  """
  if sampling.num_samples > 1 or sampling.num_beams > 1:
    raise ValueError(
      "one answer can be streamed: set sampling.num_samples=1 and"
      f" sampling.num_beams=1, got {sampling.num_samples} and"
      f" {sampling.num_beams}"
    )
  run = _Run(model, [prompt], sampling, execution, tokenizer)
  return _stream(run, sampling)


def _stream(run, sampling):
  # Apart from `stream`, so that its errors come at the call.
  state = run.start()
  [text] = run.streams()
  for i in range(sampling.max_new_tokens):
    token, done = int(state.ids[0, i]), bool(state.done[0])
    piece = "" if token in sampling.stop_ids else text.add(token)
    if done and not text.stopped:
      piece += text.finish()
    if piece:
      yield piece
    if done or text.stopped:
      break
    state = run.decode(state, i + 2)
  return run.completions(state, [text])[0][0]


class _Run:
  """One call: its arrays on the way in, its completions on the way out."""

  def __init__(self, model, prompts, sampling, execution, tokenizer):
    """Checks everything before anything is computed."""
    config = model.config
    for i, prompt in enumerate(prompts):
      _check_prompt(i, prompt, config)
    if sampling.stop_strings and tokenizer is None:
      raise ValueError(
        f"sampling.stop_strings={sampling.stop_strings} are found in text:"
        " pass tokenizer="
      )
    self.prompts = [list(map(int, prompt)) for prompt in prompts]
    self.model, self.sampling, self.tokenizer = model, sampling, tokenizer
    # A single new token cannot be split along the sequence.
    rules = dataclasses.replace(execution.rules, seq=(), residual_seq=())
    self.execution = dataclasses.replace(execution, rules=rules)
    self.copies = max(sampling.num_samples, sampling.num_beams)
    self.num_rows = len(prompts) * self.copies

    shards = self.execution.num_batch_shards
    self.batch = _bucket(len(prompts), 1)
    self.batch += -self.batch % shards
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    limit = lambda n: min(sampling.max_new_tokens, config.max_positions - n)
    self.limits = [limit(n) for n in lengths]
    total = max(map(sum, zip(lengths, self.limits)))
    self.width = min(_bucket(longest, 16), config.max_positions)
    self.slots = min(_bucket(total, 64), config.max_positions)

  def start(self):
    """The state after the first token."""
    repeat = lambda x, fill: np.repeat(self._fill(x, fill), self.copies)
    seeds = [zlib.crc32(np.int32(p).tobytes()) for p in self.prompts]
    keys = decode.row_keys(
      np.uint32(self.sampling.seed % 2**32),
      repeat(seeds, 0).astype(np.uint32),
      np.tile(np.arange(self.copies), self.batch),
    )
    settings = [self.sampling] * (self.batch * self.copies)
    self.rows = decode.Rows(
      keys=keys,
      knobs=sampler.knobs(settings),
      limits=repeat(self.limits, 1).astype(np.int32),
      stop_ids=self._stop_ids(),
    )
    return decode.start(
      self.model,
      *self._tokens(),
      self.rows,
      copies=self.copies,
      slots=self.slots,
      room=_bucket(self.sampling.max_new_tokens, 16),
      execution=self.execution,
    )

  def decode(self, state, until, stopped=None):
    """Goes on until `until` tokens; `stopped` rows [R] do not."""
    if stopped is None:
      stopped = np.zeros(self.batch * self.copies, bool)
    stopped = np.pad(stopped, (0, len(state.done) - len(stopped)))
    return decode.decode(
      self.model,
      state,
      self.rows,
      np.int32(until),
      stopped,
      execution=self.execution,
    )

  def search(self):
    """Completions of beam search."""
    sampling = self.sampling
    beams = decode.search(
      self.model,
      *self._tokens(),
      np.float32(sampling.length_penalty),
      self._stop_ids(),
      num_beams=sampling.num_beams,
      max_new_tokens=min(self.limits),
      slots=self.slots,
      execution=self.execution,
    )
    beams = jax.device_get(beams)
    answers = []
    for i, prompt in enumerate(self.prompts):
      best = range(sampling.num_samples)
      best = [w for w in best if np.isfinite(beams.score[i, w])]
      counts = [(beams.ids[i, w] >= 0).sum() for w in best]
      answers.append(
        [
          self._completion(
            prompt, beams.ids[i, w, :n], beams.log_probs[i, w, :n]
          )
          for w, n in zip(best, counts)
        ]
      )
    return answers

  def streams(self):
    """A text in the making for each row of a prompt."""
    strings = self.sampling.stop_strings
    return [
      TextStream(self.tokenizer, prompt, strings)
      for prompt in self.prompts
      for _ in range(self.copies)
    ]

  def completions(self, state, streams=None):
    """The answers in `state`; texts of `streams` are taken from there."""
    ids, log_probs, counts = jax.device_get(
      (state.ids, state.log_probs, state.counts)
    )
    answers = []
    for i, prompt in enumerate(self.prompts):
      rows = range(i * self.copies, (i + 1) * self.copies)
      answers.append(
        [
          self._completion(
            prompt,
            ids[r, : counts[r]],
            log_probs[r, : counts[r]],
            None if streams is None else streams[r],
          )
          for r in rows
        ]
      )
    return answers

  def _completion(self, prompt, ids, log_probs, text=None):
    ids, log_probs = ids.tolist(), log_probs.tolist()
    stop = bool(ids) and ids[-1] in self.sampling.stop_ids
    if text is None and self.tokenizer is not None:
      text = TextStream(self.tokenizer, prompt)
      for token in ids[: len(ids) - stop]:
        text.add(token)
    if text is not None:
      text.finish()
      if text.stopped:
        # The rows beside it went on a little; the stop cut this one.
        ids, log_probs = ids[: text.count], log_probs[: text.count]
    stopped = stop or (text is not None and text.stopped)
    return Completion(
      ids=ids,
      text=None if text is None else text.text,
      log_probs=log_probs,
      finish_reason="stop" if stopped else "length",
    )

  def _tokens(self):
    """Prompts padded on the right [B, T], and their lengths [B]."""
    tokens = np.zeros((self.batch, self.width), np.int32)
    for row, prompt in zip(tokens, self.prompts):
      row[: len(prompt)] = prompt
    lengths = self._fill([len(prompt) for prompt in self.prompts], 0)
    return tokens, lengths.astype(np.int32)

  def _stop_ids(self):
    ids = self.sampling.stop_ids
    return np.array(ids + (-1,) * (_bucket(len(ids), 4) - len(ids)), np.int32)

  def _fill(self, values, fill):
    """One value a row of the batch: `fill` for rows that are no prompt."""
    return np.array(values + [fill] * (self.batch - len(values)))


def _check_prompt(i, prompt, config):
  if not len(prompt):
    raise ValueError(
      f"prompt {i} is empty: give at least one token, such as the tokenizer's"
      " beginning-of-text"
    )
  if len(prompt) >= config.max_positions:
    raise ValueError(
      f"prompt {i} has {len(prompt)} tokens; with at least one new token it"
      f" must fit into model.max_positions={config.max_positions}: shorten it"
    )
  if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
    raise ValueError(
      f"prompt {i} has ids from {min(prompt)} to {max(prompt)}, outside of"
      f" model.vocab_size={config.vocab_size}: was it made by the tokenizer of"
      " this model?"
    )


def _bucket(n: int, least: int) -> int:
  """The next power of two."""
  return max(least, 1 << max(n - 1, 0).bit_length())
