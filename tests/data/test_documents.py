"""Readers: what comes out, and what is said when something is wrong."""

import gzip
import json

import pytest

from data import documents
from data.config import Source
from data.report import Report


def read(path, **settings):
  fields = {"format", "text_field", "id_field", "name"} & set(settings)
  source = Source(path=str(path), **{k: settings.pop(k) for k in fields})
  return list(documents.read(source, **settings))


def test_jsonl_keeps_id_text_and_other_fields(tmp_path):
  lines = [
    {"id": "x", "text": "één", "lang": "nl"},
    {"text": "two"},
    {"id": 7, "text": "three"},
  ]
  path = tmp_path / "a.jsonl"
  path.write_text("\n\n".join(map(json.dumps, lines)))
  assert read(path) == [
    documents.Document("x", "één", {"lang": "nl"}),
    documents.Document("a.jsonl:3", "two"),
    documents.Document("7", "three"),
  ]
  assert [d.id for d in read(path, name="web")] == [
    "web/x",
    "web/a.jsonl:3",
    "web/7",
  ]


def test_gzip_reads_like_plain(tmp_path):
  plain, zipped = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
  plain.write_text('{"text": "one"}\n{"text": "two"}\n')
  zipped.write_bytes(gzip.compress(plain.read_bytes()))
  assert [d.text for d in read(zipped)] == [d.text for d in read(plain)]


def test_truncated_gzip_is_named(tmp_path):
  path = tmp_path / "a.jsonl.gz"
  path.write_bytes(gzip.compress(b'{"text": "one"}\n' * 1000)[:-20])
  with pytest.raises(ValueError, match=r"a\.jsonl\.gz.*damaged"):
    read(path)


def test_glob_gives_ids_that_do_not_depend_on_the_place(tmp_path):
  for place in ("here", "there"):
    (tmp_path / place / "sub").mkdir(parents=True)
    (tmp_path / place / "b.txt").write_text("b")
    (tmp_path / place / "sub" / "a.txt").write_text("a")
  ids = [
    [d.id for d in read(tmp_path / place / "**" / "*.txt", format="text")]
    for place in ("here", "there")
  ]
  assert ids[0] == ids[1] == ["b.txt", "sub/a.txt"]


def test_missing_file_says_where_it_looked(tmp_path):
  with pytest.raises(ValueError, match="nothing.jsonl' names no file"):
    read(tmp_path / "nothing.jsonl")
  with pytest.raises(ValueError, match="is a folder"):
    read(tmp_path)


@pytest.mark.parametrize("format", ["text", "jsonl"])
@pytest.mark.parametrize("content", ["", " \n\n"])
def test_empty_file_alone_is_an_error(tmp_path, format, content):
  path = tmp_path / "a"
  path.write_text(content)
  with pytest.raises(ValueError, match="no usable document.*\n.*\n.*1  empty"):
    read(path, format=format)


def test_empty_file_among_others_is_counted(tmp_path):
  (tmp_path / "a.txt").write_text("")
  (tmp_path / "b.txt").write_text("text")
  report = Report("read")
  assert len(read(tmp_path / "*.txt", format="text", report=report)) == 1
  assert report.notes == {"empty files": 1} and report.kept == 1


BAD_LINES = {
  "not JSON: Expecting value at column 10": b'{"text": x',
  "no field 'text', the line has ..body..": b'{"body": "x"}',
  "must be a string, got int": b'{"text": 3}',
  "wanted a JSON object, got list": b'["text"]',
  "lone surrogate": b'{"text": "\\ud800"}',
  "nested too deeply": b"[" * 100_000,
}


@pytest.mark.parametrize("message", BAD_LINES)
def test_bad_line_names_file_and_line_or_is_skipped(tmp_path, message):
  path = tmp_path / "a.jsonl"
  bad = BAD_LINES[message]
  path.write_bytes(b'{"text": "1"}\n' + bad + b'\n{"text": "3"}')
  with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{message}.*on_bad_l"):
    read(path)
  report = Report("read")
  got = read(path, on_bad_line="skip", report=report)
  assert [d.text for d in got] == ["1", "3"]
  assert report.removed == {"bad line": [f"{path}:2"]}


def test_invalid_utf8_has_three_policies(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
  with pytest.raises(ValueError, match=r"a\.jsonl:2: not UTF-8.*0xe9"):
    read(path)
  replaced, skipped = Report("read"), Report("read")
  got = read(path, on_bad_utf8="replace", report=replaced)
  assert [d.text for d in got] == ["ok", "caf\ufffd"]
  assert replaced.notes == {"invalid UTF-8 replaced by U+FFFD": 1}
  got = read(path, on_bad_utf8="skip", report=skipped)
  assert [d.text for d in got] == ["ok"]
  assert skipped.removed == {"invalid UTF-8": [f"{path}:2"]}


@pytest.mark.parametrize("name", ["format", "on_bad_line", "on_bad_utf8"])
def test_unknown_policy(tmp_path, name):
  with pytest.raises(ValueError, match=f"{name} must be one of .* got 'skp'"):
    read(tmp_path, **{name: "skp"})


def test_conversations_are_read_as_messages(tmp_path):
  path = tmp_path / "a.jsonl"
  messages = [{"role": "user", "content": "hi"}]
  path.write_text(json.dumps({"messages": messages, "id": "c1"}))
  (document,) = read(path, format="chat")
  assert document.id == "c1" and document.meta["messages"] == messages
  path.write_text(json.dumps({"messages": "hi"}))
  with pytest.raises(ValueError, match=r"a\.jsonl:1: wanted .*messages"):
    read(path, format="chat")
