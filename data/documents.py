"""Documents in: readers of JSONL and text files that say what is wrong."""

import contextlib
import dataclasses
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from data.config import Source
from data.report import Report


@dataclasses.dataclass(frozen=True)
class Document:
  """A text and where it came from.

  Attributes:
    id: unique in a corpus, and the same wherever the corpus lies.
    text: valid Unicode (no lone surrogates).
    meta: the other fields of a JSONL line.
  """

  id: str
  text: str
  meta: dict = dataclasses.field(default_factory=dict)


def find_files(pattern: str) -> list[Path]:
  """The files that a path or glob names, sorted.

  Raises:
    ValueError: there is none.
  """
  paths = sorted(
    Path(p) for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)
  )
  if not paths and os.path.isfile(pattern):  # a name that holds [ or *
    paths = [Path(pattern)]
  if not paths:
    what = "is a folder" if os.path.isdir(pattern) else "names no file"
    raise ValueError(
      f"sources.path={pattern!r} {what} (current folder: {os.getcwd()});"
      " give a file or a glob such as 'corpus/**/*.txt'"
    )
  return paths


def read(
  source: Source,
  *,
  on_bad_line: str = "error",
  on_bad_utf8: str = "error",
  report: Report | None = None,
) -> Iterator[Document]:
  """Yields the documents of a source, file by file in the order of names.

  An empty file among others is counted and passed over.

  Args:
    source: files and their format. Documents of a "chat" source have their
      conversation as canonical JSON text and in `meta["messages"]`.
    on_bad_line: "error" or "skip", see `PrepareConfig`.
    on_bad_utf8: "error", "replace" or "skip", see `PrepareConfig`.
    report: counts what is passed over.

  Raises:
    ValueError: no file, no document in any file, or a bad line or byte under
      "error"; the message names file and line.
  """
  for name, value, allowed in (
    ("sources.format", source.format, ("jsonl", "text", "chat")),
    ("on_bad_line", on_bad_line, ("error", "skip")),
    ("on_bad_utf8", on_bad_utf8, ("error", "replace", "skip")),
  ):
    if value not in allowed:
      raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
  report = Report("read") if report is None else report
  root = _fixed_folder(source.path)
  empty = True
  for path in find_files(source.path):
    name = os.path.join(source.name, os.path.relpath(path, root))
    if source.format == "text":
      documents = _read_text(path, name, on_bad_utf8, report)
    else:
      documents = _read_jsonl(
        path, name, source, on_bad_line, on_bad_utf8, report
      )
    for document in documents:
      empty = False
      report.keep()
      yield document
  if empty:
    raise ValueError(
      f"sources.path={source.path!r} holds no usable document: its files are"
      f" empty or every line was passed over\n{report}"
    )


def _fixed_folder(pattern: str) -> str:
  """The part of a glob before its first wildcard folder.

  Ids are relative to it, so that they do not change with the place where the
  corpus lies.
  """
  folder = os.path.dirname(pattern)
  while glob.has_magic(folder):
    folder = os.path.dirname(folder)
  return folder or "."


@contextlib.contextmanager
def _open(path: Path):
  try:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
      yield file
  except (EOFError, zlib.error, gzip.BadGzipFile) as error:
    raise ValueError(
      f"{path} is damaged or not gzip ({error}): fetch or write it again"
    ) from None


def _decode(
  raw: bytes, where: str, on_bad_utf8: str, report: Report
) -> str | None:
  """Bytes -> text under the UTF-8 policy; None: leave it out."""
  try:
    return raw.decode("utf-8")
  except UnicodeDecodeError as error:
    if on_bad_utf8 == "error":
      raise ValueError(
        f"{where}: not UTF-8 at byte {error.start}"
        f" (0x{raw[error.start]:02x}); convert the file, or set"
        " on_bad_utf8='replace' or 'skip'"
      ) from None
  if on_bad_utf8 == "replace":
    report.note("invalid UTF-8 replaced by U+FFFD")
    return raw.decode("utf-8", "replace")
  report.remove("invalid UTF-8", where)
  return None


def _read_text(path, name, on_bad_utf8, report) -> Iterator[Document]:
  with _open(path) as file:
    raw = file.read()
  text = _decode(raw, str(path), on_bad_utf8, report)
  if text is None:
    return
  if not text.strip():
    report.note("empty files")
    return
  yield Document(name, text)


def _read_jsonl(
  path, name, source, on_bad_line, on_bad_utf8, report
) -> Iterator[Document]:
  chat = source.format == "chat"
  lines = 0
  with _open(path) as file:
    for number, raw in enumerate(file, 1):
      if not raw.strip():
        continue
      lines += 1
      text = _decode(raw, f"{path}:{number}", on_bad_utf8, report)
      if text is None:
        continue
      try:
        record = json.loads(text.strip())
        body = _messages(record) if chat else _text(record, source.text_field)
        body.encode()  # JSON escapes can spell lone surrogates
      except (ValueError, RecursionError) as error:
        if on_bad_line == "error":
          raise ValueError(
            f"{path}:{number}: {_explain(error)}; repair the line, or set"
            " on_bad_line='skip' to leave such lines out"
          ) from None
        report.remove("bad line", f"{path}:{number}")
        continue
      identity = record.pop(source.id_field, None)
      if not chat:
        del record[source.text_field]
      if identity is None:
        identity = f"{name}:{number}"
      elif source.name:
        identity = f"{source.name}/{identity}"
      yield Document(str(identity), body, record)
  if not lines:
    report.note("empty files")


def _text(record, field: str) -> str:
  if not isinstance(record, dict):
    raise ValueError(f"wanted a JSON object, got {type(record).__name__}")
  if field not in record:
    raise ValueError(
      f"no field {field!r}, the line has {sorted(record)} (text_field says"
      " which one holds the text)"
    )
  if not isinstance(record[field], str):
    raise ValueError(
      f"field {field!r} must be a string, got {type(record[field]).__name__}"
    )
  return record[field]


def _messages(record) -> str:
  if not isinstance(record, dict) or not isinstance(
    record.get("messages"), list
  ):
    raise ValueError(
      'wanted {"messages": [{"role": ..., "content": ...}, ...]}'
    )
  return json.dumps(record["messages"], ensure_ascii=False, sort_keys=True)


def _explain(error: Exception) -> str:
  if isinstance(error, json.JSONDecodeError):
    return f"not JSON: {error.msg} at column {error.colno}"
  if isinstance(error, UnicodeEncodeError):
    return "the text holds a lone surrogate, which is not valid Unicode"
  if isinstance(error, RecursionError):
    return "the JSON is nested too deeply"
  return str(error)
