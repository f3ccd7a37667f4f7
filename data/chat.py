"""Conversations -> token ids and the mask of what the assistant said.

A chat template is a Jinja program that comes with a checkpoint; it runs in
Jinja's sandbox. The mask is decided in token space: the rendering is cut at
the borders of the assistant's turns before it is tokenised, so no token
straddles a border and the prompt part has the very ids that generation will
start from. Nothing is searched for in the text.
"""

import datetime
import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.tokenizer import Tokenizer, split_special

DEFAULT_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- generation %}{{ message.content + '<|end|>' }}{% endgeneration %}
{%- elif message.role in ('system', 'user') %}
{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- else %}
{{- raise_exception('roles are system, user, assistant; got '
                    + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

Message = dict[str, Any]  # {"role": str, "content": str, ...}

# Unicode noncharacters that stand, while a template runs, for what must
# survive it: borders of a generation block, and literals of the content.
_BEGIN, _END, _HOLD = "\ufdd0", "\ufdd1", "\ufdd2"
_HELD = f"{_HOLD}([0-9]+){_HOLD}"


class ChatTemplate:
  """A Jinja chat template as Hugging Face writes them.

  Templates see `messages`, `add_generation_prompt`, `bos_token`, `eos_token`,
  `raise_exception`, `strftime_now`, the `tojson` filter, loop controls and
  `{% generation %}` blocks.
  """

  def __init__(self, source: str):
    import jinja2

    self.source = source
    try:
      self._template = _environment().from_string(source)
      self._marks_generation = bool(_GENERATION.search(source))
    except jinja2.TemplateSyntaxError as error:
      raise ValueError(
        f"chat template, line {error.lineno}: {error.message}"
      ) from None

  @classmethod
  def load(cls, path: str | os.PathLike) -> "ChatTemplate":
    """Reads a Jinja file, or the template in a Hugging Face folder."""
    path = Path(path)
    source = path.read_text() if path.is_file() else _template_in(path)
    if source is not None:
      return cls(source)
    raise ValueError(
      f"no chat template at {str(path)!r}: wanted a Jinja file, or a folder"
      " with chat_template.jinja or a chat_template in tokenizer_config.json"
    )

  def render(
    self,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    bos_token: str = "",
    eos_token: str = "",
    **variables,
  ) -> str:
    """The conversation as one string."""
    text, literals = self._render(
      messages, add_generation_prompt, set(), bos_token, eos_token, variables
    )
    parts = re.split(_HELD, _without_borders(text))
    parts[1::2] = [literals[int(number)] for number in parts[1::2]]
    return "".join(parts)

  def encode(
    self, tokenizer: Tokenizer, messages: Sequence[Message], **variables
  ) -> tuple[list[int], list[bool]]:
    """Token ids, and for each whether the assistant wrote it.

    The token that ends an assistant turn is in the mask: a model never
    trained on it never stops. What a template writes after that token (a
    newline) is not: it is never sampled. Special tokens spelled in the
    content of a message stay text.

    Returns:
      (ids, mask) of equal length.

    Raises:
      ValueError: the template fails or refuses the conversation, the mask
        is empty, or BOS is written twice.
    """
    text, literals = self._render_for(tokenizer, messages, False, variables)
    if self._marks_generation:
      runs = _runs_of_blocks(text, _piece(tokenizer, tokenizer.eos_id))
    else:
      runs = self._runs_of_prefixes(tokenizer, messages, text, variables)
    ids, mask = [], []
    for run, is_assistant in runs:
      run_ids = _encode_held(tokenizer, run, literals)
      ids += run_ids
      mask += [is_assistant] * len(run_ids)
    _check_bos(tokenizer, ids)
    if not any(mask):
      raise ValueError(
        "the assistant mask is empty: there would be nothing to learn from a"
        f" conversation with roles {[m['role'] for m in messages]}; it needs"
        " an assistant message, and the template must write"
        " it inside {% generation %} ... {% endgeneration %} if it has such"
        " blocks"
      )
    return ids, mask

  def encode_prompt(
    self, tokenizer: Tokenizer, messages: Sequence[Message], **variables
  ) -> list[int]:
    """Token ids up to where the assistant's next answer begins."""
    text, literals = self._render_for(tokenizer, messages, True, variables)
    ids = _encode_held(tokenizer, _without_borders(text), literals)
    _check_bos(tokenizer, ids)
    return ids

  def _render(
    self, messages, add_generation_prompt, held, bos_token, eos_token, variables
  ):
    """Renders with strings of the content held back.

    Args:
      held: besides our own marks, what the content must not spell.

    Returns:
      (text, literals): in the text, number n between two `_HOLD` stands for
      literals[n].
    """
    import jinja2

    _check_messages(messages)
    literals = []
    held = {*held, _BEGIN, _END, _HOLD}
    try:
      text = self._template.render(
        messages=_hold(messages, held, literals),
        add_generation_prompt=add_generation_prompt,
        bos_token=bos_token,
        eos_token=eos_token,
        **variables,
      )
    except (jinja2.TemplateError, TypeError, AttributeError, LookupError) as e:
      raise ValueError(
        "the chat template failed on a conversation with roles"
        f" {[m['role'] for m in messages]}: {e}"
      ) from None
    return text, literals

  def _render_for(self, tokenizer, messages, add_generation_prompt, variables):
    """Renders so that content cannot spell the tokenizer's control tokens."""
    return self._render(
      messages,
      add_generation_prompt,
      tokenizer.special_tokens,
      _piece(tokenizer, tokenizer.bos_id),
      _piece(tokenizer, tokenizer.eos_id),
      variables,
    )

  def _runs_of_prefixes(self, tokenizer, messages, text, variables):
    """Assistant turns by rendering ever longer beginnings.

    A turn is what the conversation up to and including it has beyond the
    generation prompt before it.
    """
    runs, done = [], 0
    for i, message in enumerate(messages):
      if message["role"] != "assistant":
        continue
      # The literals are numbered in order of messages, so beginnings of the
      # conversation hold the same numbers.
      before, _ = self._render_for(tokenizer, messages[:i], True, variables)
      after, _ = self._render_for(
        tokenizer, messages[: i + 1], False, variables
      )
      if not (after.startswith(before) and text.startswith(after)):
        raise ValueError(
          f"the chat template rewrites earlier turns when message {i} is"
          " added, so the assistant's tokens cannot be told apart: mark them"
          " in the template with {% generation %} ... {% endgeneration %}"
        )
      turn = after[len(before) :]
      ends = [
        found.end()
        for token in tokenizer.special_tokens
        for found in re.finditer(re.escape(token), turn)
      ]
      start, stop = len(before), len(before) + max(ends, default=len(turn))
      runs += [(text[done:start], False), (text[start:stop], True)]
      done = stop
    return runs + [(text[done:], False)]


def template_for(
  tokenizer: str | os.PathLike, chat_template: str | os.PathLike | None = None
) -> ChatTemplate:
  """The template that goes with a tokenizer.

  Args:
    tokenizer: path of the tokenizer.
    chat_template: Jinja file or folder that is used instead; None: the
      template that lies beside the tokenizer, else `DEFAULT_TEMPLATE`.
  """
  if chat_template is not None:
    return ChatTemplate.load(chat_template)
  folder = Path(tokenizer)
  folder = folder if folder.is_dir() else folder.parent
  source = _template_in(folder)
  return ChatTemplate(DEFAULT_TEMPLATE if source is None else source)


_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def _template_in(folder: Path) -> str | None:
  """The template of a Hugging Face folder, where there is one."""
  if (folder / "chat_template.jinja").is_file():
    return (folder / "chat_template.jinja").read_text()
  if not (folder / "tokenizer_config.json").is_file():
    return None
  config = json.loads((folder / "tokenizer_config.json").read_text())
  template = config.get("chat_template")
  if isinstance(template, list):  # several, by name
    template = {t["name"]: t["template"] for t in template}.get("default")
  return template


@functools.cache
def _environment():
  """The sandbox that Hugging Face templates expect."""
  import jinja2
  import jinja2.ext
  import jinja2.nodes
  import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """`{% generation %}`: its output is what the assistant wrote."""

    tags = frozenset({"generation"})

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      call = self.call_method("_mark")
      return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller):
      return f"{_BEGIN}{caller()}{_END}"

  def raise_exception(message):
    raise jinja2.TemplateError(message)

  def tojson(value, indent=None, ensure_ascii=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, jinja2.ext.loopcontrols],
  )
  environment.filters["tojson"] = tojson
  environment.globals["raise_exception"] = raise_exception
  environment.globals["strftime_now"] = lambda form: (
    datetime.datetime.now().strftime(form)
  )
  return environment


def _check_messages(messages) -> None:
  if not isinstance(messages, Sequence) or isinstance(messages, str):
    raise ValueError(
      "wanted a list of messages {'role': ..., 'content': ...}, got"
      f" {type(messages).__name__}"
    )
  for i, message in enumerate(messages):
    if not isinstance(message, dict) or not isinstance(
      message.get("role"), str
    ):
      raise ValueError(
        f"message {i} must be a dict with a 'role', got {message!r:.100}"
      )
    if "content" not in message and "tool_calls" not in message:
      raise ValueError(
        f"message {i} ({message['role']}) has no 'content', only"
        f" {sorted(message)}"
      )


def _piece(tokenizer: Tokenizer, token_id: int | None) -> str:
  return "" if token_id is None else tokenizer.id_to_piece(token_id)


def _hold(value, held: set[str], literals: list[str]):
  """Replaces what is held, in strings however deep, by numbered marks."""
  if isinstance(value, dict):
    return {
      k: v if k == "role" else _hold(v, held, literals)
      for k, v in value.items()
    }
  if isinstance(value, list | tuple):
    return [_hold(v, held, literals) for v in value]
  if not isinstance(value, str):
    return value
  parts = []
  for part, special in split_special(value, held):
    if special:
      literals.append(part)
      part = f"{_HOLD}{len(literals) - 1}{_HOLD}"
    parts.append(part)
  return "".join(parts)


def _without_borders(text: str) -> str:
  return text.replace(_BEGIN, "").replace(_END, "")


def _encode_held(tokenizer, text: str, literals: list[str]) -> list[int]:
  """Ids of rendered text: its own control tokens are real, held ones text."""
  ids = []
  for i, part in enumerate(re.split(_HELD, text)):
    if i % 2:
      ids += tokenizer.encode(literals[int(part)])
    elif part:
      ids += tokenizer.encode(part, allow_special=True)
  return ids


def _runs_of_blocks(text: str, eos_token: str) -> list[tuple[str, bool]]:
  """Cuts at the borders of generation blocks, EOS after a block included."""
  runs = []
  for i, part in enumerate(text.split(_BEGIN)):
    inside, end, outside = part.partition(_END)
    if i == 0 or not end:
      runs.append((part, False))
      continue
    if eos_token and outside.startswith(eos_token):
      inside, outside = inside + eos_token, outside[len(eos_token) :]
    runs += [(inside, True), (outside, False)]
  return runs


def _check_bos(tokenizer: Tokenizer, ids: list[int]) -> None:
  if tokenizer.bos_id is not None and ids[:2] == [tokenizer.bos_id] * 2:
    raise ValueError(
      f"the conversation begins with two {_piece(tokenizer, tokenizer.bos_id)}"
      " (BOS): the template writes it once too often"
    )
