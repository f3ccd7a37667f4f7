"""Text repair and filters; every removal has a reason.

A filter takes a text and a limit and returns (keep, reason).
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator

from data.config import CleanConfig
from data.documents import Document
from data.report import Report

# C0 and C1 controls but tab and newline; DEL; byte-order mark.
_CONTROL = {
  code: None
  for code in (*range(0x20), *range(0x7F, 0xA0), 0xFEFF)
  if chr(code) not in "\t\n"
}

_LETTERS = re.compile(r"[^\W\d_]+")


def normalise(text: str) -> str:
  """Newlines as \\n, no control characters, Unicode in composed form (NFC)."""
  text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_CONTROL)
  return unicodedata.normalize("NFC", text)


def long_enough(text: str, min_chars: int) -> tuple[bool, str]:
  return len(text) >= min_chars, f"shorter than {min_chars} characters"


def short_lines(text: str, max_line_chars: int) -> tuple[bool, str]:
  longest = max(map(len, text.split("\n")))
  return longest <= max_line_chars, f"a line over {max_line_chars} characters"


def alphabetic(text: str, min_share: float) -> tuple[bool, str]:
  """Letters of any script per character that is not a space."""
  solid = sum(map(len, text.split()))
  letters = sum(map(len, _LETTERS.findall(text)))
  keep = letters >= min_share * solid
  return keep, f"fewer than {min_share:.0%} letters"


def varied_lines(text: str, max_share: float) -> tuple[bool, str]:
  """Non-blank lines that occurred before in the document (blank ones repeat
  in every text and say nothing)."""
  lines = [line for line in map(str.strip, text.split("\n")) if line]
  repeated = len(lines) - len(set(lines))
  keep = repeated <= max_share * len(lines)
  return keep, f"more than {max_share:.0%} repeated lines"


def filters(
  config: CleanConfig,
) -> list[tuple[Callable[..., tuple[bool, str]], float]]:
  """The filters that a config switches on, with their limits."""
  all_filters = [
    (long_enough, config.min_chars),
    (short_lines, config.max_line_chars),
    (alphabetic, config.min_alphabetic),
    (varied_lines, config.max_repeated_lines),
  ]
  return [(f, limit) for f, limit in all_filters if limit is not None]


def clean(
  documents: Iterable[Document],
  config: CleanConfig | None = None,
  *,
  report: Report,
) -> Iterator[Document]:
  """Yields normalised documents that pass every filter.

  A document is removed for the first filter that it fails.
  """
  active = filters(config or CleanConfig())
  for document in documents:
    text = normalise(document.text)
    if text != document.text:
      report.note("documents normalised")
    for keep_if, limit in active:
      keep, reason = keep_if(text, limit)
      if not keep:
        report.remove(reason, document.id)
        break
    else:
      report.keep()
      yield Document(document.id, text, document.meta)
