"""Text of a growing list of tokens: whole characters, stop strings cut off."""

# The tokens of the prompt that are decoded along, so that a SentencePiece
# model does not take the first new token for the start of a text and drop
# its space.
CONTEXT = 4

_UNFINISHED = "\ufffd"  # what decoders make of a part of a character


class TextStream:
  """Turns tokens, as they come, into pieces of text that are final.

  Held back are the bytes of an unfinished character and any ending that may
  yet become a stop string, also across the borders of tokens. The pieces
  joined are the text of the answer.

  Attributes:
    text: what was given out so far.
    count: tokens taken so far.
    stopped: a stop string was found; further tokens are refused.
  """

  def __init__(self, tokenizer, prompt=(), stop_strings=()):
    """Starts after `prompt`.

    Args:
      tokenizer: has `decode(ids) -> str`.
      prompt: token ids that the answer follows.
      stop_strings: texts that end the answer and do not belong to it.
    """
    self.text = ""
    self.count = 0
    self.stopped = False
    self._decode = tokenizer.decode
    self._stop_strings = tuple(stop_strings)
    self._ids = list(prompt)[-CONTEXT:]
    self._skip = len(self._decode(self._ids)) if self._ids else 0

  def add(self, token: int) -> str:
    """Takes the next token; returns the text that it makes final."""
    assert not self.stopped, "a token after a stop string"
    self.count += 1
    self._ids.append(int(token))
    text = self._decode(self._ids)[self._skip :]
    found = [text.find(stop) for stop in self._stop_strings if stop in text]
    if found:
      self.stopped = True
      return self._give(text[: min(found)])
    text = text.rstrip(_UNFINISHED)
    return self._give(text[: len(text) - self._held(text)])

  def finish(self) -> str:
    """No token follows: returns what was held back."""
    if self.stopped:
      return ""
    return self._give(self._decode(self._ids)[self._skip :])

  def _give(self, text):
    # Nothing given out is taken back: `text` may be shorter where its end
    # is held back.
    piece = text[len(self.text) :]
    self.text += piece
    return piece

  def _held(self, text):
    """Length of the longest ending of `text` that begins a stop string."""
    return max(
      (
        n
        for stop in self._stop_strings
        for n in range(1, len(stop))
        if text.endswith(stop[:n])
      ),
      default=0,
    )
