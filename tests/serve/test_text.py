"""Streams against the text of all tokens at once, on every way to cut it."""

import hypothesis
from hypothesis import strategies as st

from serve.text import TextStream

START = 0x2581  # SentencePiece's mark of a word's start


class Bytes:
  """A tokenizer whose tokens are bytes."""

  def decode(self, ids):
    return bytes(ids).decode("utf-8", errors="replace")


class Pieces:
  """A tokenizer whose tokens are texts; it drops a first space."""

  def __init__(self, *pieces):
    self.pieces = pieces

  def decode(self, ids):
    return "".join(self.pieces[i] for i in ids).removeprefix(" ")


def run(tokenizer, ids, stop_strings=(), prompt=()):
  """The pieces that a stream gives out."""
  stream = TextStream(tokenizer, prompt, stop_strings)
  pieces = []
  for token in ids:
    pieces.append(stream.add(token))
    if stream.stopped:
      break
  pieces.append(stream.finish())
  assert "".join(pieces) == stream.text
  return pieces, stream


@hypothesis.given(st.text(max_size=12))
def test_pieces_end_at_characters(text):
  pieces, stream = run(Bytes(), text.encode())
  assert stream.text == text
  # A character of n bytes comes with the last of them.
  assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_bytes_that_are_no_text_come_at_the_end():
  pieces, _ = run(Bytes(), b"a\xe2\x82")
  assert pieces[0] == "a" and "".join(pieces[1:3]) == ""
  assert set(pieces[3]) == {"\ufffd"}


@hypothesis.given(
  st.text("ab", max_size=12),
  st.lists(st.text("ab", min_size=1, max_size=4), max_size=2),
)
def test_stop_strings(text, stops):
  """Equal to looking for the earliest end of a stop string in prefixes."""
  wanted, stopped = text, False
  for end in range(len(text) + 1):
    found = [text[:end].find(stop) for stop in stops if stop in text[:end]]
    if found:
      wanted, stopped = text[: min(found)], True
      break
  _, stream = run(Bytes(), text.encode(), stops)
  assert (stream.text, stream.stopped) == (wanted, stopped)
  assert stream.count == (end if stopped else len(text))


def test_what_may_become_a_stop_string_is_held_back():
  pieces, _ = run(Bytes(), b"x<|y<|end", ["<|end|>"])
  assert pieces == ["x", "", "", "<|y", "", "", "", "", "", "<|end"]


def test_stop_string_inside_one_token():
  pieces, stream = run(
    Pieces("one", " two STOP three", " four"), [0, 1, 2], ["STOP"]
  )
  assert pieces == ["one", " two ", ""] and stream.count == 2


def test_the_first_space_is_kept_after_a_prompt():
  tokenizer = Pieces(" The", " cat", " sat")
  assert run(tokenizer, [2], prompt=[0, 1])[1].text == " sat"
  assert run(tokenizer, [2])[1].text == "sat"
