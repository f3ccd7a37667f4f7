"""Filters against texts written to be on either side of each limit."""

import pytest

from data import clean
from data.config import CleanConfig
from data.documents import Document
from data.report import Report

OFF = dict.fromkeys(
  ("min_chars", "max_line_chars", "min_alphabetic", "max_repeated_lines")
)


def test_normalise():
  assert clean.normalise("\ufeffa\r\nb\rc\x00\x1b\x85d\te\n") == "a\nb\ncd\te\n"
  assert clean.normalise("e\u0301 \u2028 \U0001f600") == "é \u2028 \U0001f600"


@pytest.mark.parametrize(
  "setting, limit, good, bad, reason",
  [
    ("min_chars", 4, "four", "thr", "shorter than 4 characters"),
    ("max_line_chars", 3, "abc\nabc", "abcd\na", "a line over 3 characters"),
    ("min_alphabetic", 0.5, "日本 12", "ab 123", "fewer than 50% letters"),
    (
      "max_repeated_lines",
      0.5,
      "a\na\n\n\n\n\nb\nb",
      "a\n a\na",
      "more than 50% repeated lines",
    ),
  ],
)
def test_each_filter_on_both_sides(setting, limit, good, bad, reason):
  config = CleanConfig(**OFF | {setting: limit})
  report = Report("clean")
  documents = [Document("good", good), Document("bad", bad)]
  kept = list(clean.clean(documents, config, report=report))
  assert kept == [documents[0]]
  assert report.removed == {reason: ["bad"]} and report.kept == 1
  # Switched off, the filter removes nothing.
  off = CleanConfig(**OFF)
  assert len(list(clean.clean(documents, off, report=Report("clean")))) == 2


def test_report_adds_up_and_prints():
  report = Report("clean")
  documents = [Document(str(i), "x" * i) for i in range(200)]
  list(clean.clean(documents, report=report))
  assert (report.kept, report.num_removed) == (100, 100)
  assert str(report) == (
    "clean: 200 documents in, 100 kept, 100 removed\n"
    "       100  shorter than 100 characters (such as 0)"
  )
