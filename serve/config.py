"""How to continue a prompt. Imports no JAX: command lines read it."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """What `serve.generate` draws, and when it stops.

  Attributes:
    max_new_tokens: longest continuation, stop token included.
    temperature: divides logits; 0 is greedy (ties: the lowest id).
    top_k: draw from the k most likely tokens; 0: from all.
    top_p: draw from the fewest tokens whose probability reaches p
      (arXiv:1904.09751); 1: from all.
    min_p: draw from tokens at least min_p times as likely as the likeliest
      (arXiv:2407.01082); 0: from all.
    num_samples: continuations of each prompt; beam search returns its best.
    num_beams: beams kept by beam search; 1: no beam search.
    length_penalty: beams are ranked by log-probability / length ** penalty.
    stop_ids: tokens that end a continuation.
    stop_strings: texts that end it; they are cut off.
    seed: one seed, prompt and sample number give one continuation, whatever
      else is in the batch.
  """

  max_new_tokens: int = 256
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  num_samples: int = 1
  num_beams: int = 1
  length_penalty: float = 1.0
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  seed: int = 0

  def __post_init__(self):
    for name in ("max_new_tokens", "num_samples", "num_beams"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"sampling.{name} must be at least 1, got {getattr(self, name)}"
        )
    for name in ("temperature", "top_k"):
      if getattr(self, name) < 0:
        raise ValueError(
          f"sampling.{name} must not be negative, got {getattr(self, name)}"
        )
    for name in ("top_p", "min_p"):
      if not 0.0 <= getattr(self, name) <= 1.0:
        raise ValueError(
          f"sampling.{name} must be in [0, 1], got {getattr(self, name)}"
        )
    if any(not text for text in self.stop_strings):
      raise ValueError(
        "sampling.stop_strings must not hold an empty text: it would stop"
        f" every answer at once; got {self.stop_strings}"
      )
    if self.num_beams > 1:
      self._check_beams()

  def _check_beams(self):
    """Beam search draws nothing: settings of a draw would do nothing."""
    if self.temperature != 0.0:
      raise ValueError(
        f"sampling.num_beams={self.num_beams} searches and draws nothing: set"
        f" sampling.temperature=0, got {self.temperature}"
      )
    if self.top_k or self.top_p < 1.0 or self.min_p:
      raise ValueError(
        f"sampling.num_beams={self.num_beams} draws nothing: leave"
        f" sampling.top_k (got {self.top_k}), top_p (got {self.top_p}) and"
        f" min_p (got {self.min_p}) at 0, 1 and 0"
      )
    if self.num_samples > self.num_beams:
      raise ValueError(
        f"sampling.num_samples={self.num_samples} of {self.num_beams} beams:"
        " raise sampling.num_beams"
      )
    if self.stop_strings:
      raise ValueError(
        "beam search stops at tokens: use sampling.stop_ids in place of"
        f" sampling.stop_strings={self.stop_strings}"
      )
