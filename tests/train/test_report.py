"""report.html: whole, escaped, self-contained, and true to its numbers."""

import base64
import html.parser
import json
import math
import re
import runpy
import sys
import xml.etree.ElementTree

import pytest

from train import monitor, report

HISTORY = [
  {"step": s, "loss": 4.0 - s / 10, "grad_norm": 1.0, "tokens_per_second": 9e4}
  | ({"held_out_bits_per_byte": 2.0 - s / 20} if s % 5 == 0 else {})
  for s in range(1, 21)
]


class Parser(html.parser.HTMLParser):
  """Counts tags and insists that they are closed in order."""

  VOID = ("meta", "img")

  def __init__(self, page):
    super().__init__()
    self.open, self.counts, self.text = [], {}, ""
    self.feed(page)
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.counts[tag] = self.counts.get(tag, 0) + 1
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    if tag not in self.VOID:
      assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += data


def page(tmp_path, **kwargs) -> str:
  path = tmp_path / "report.html"
  runs = [report.Run(name="base", history=HISTORY, config={"a": {"b": 1}})]
  report.write(path, **({"runs": runs, "title": "A run"} | kwargs))
  return path.read_text()


def test_holds_curves_settings_and_tables(tmp_path):
  text = page(
    tmp_path,
    summary={"bits per byte": "1.52"},
    tables=[
      report.Table(title="Answers", columns=["Q", "A"], rows=[["1+1?", "2"]])
    ],
  )
  parsed = Parser(text)
  assert parsed.counts["img"] == 4
  assert parsed.counts["td"] == 2
  for word in ("A run", "1.52", "Answers", "1+1?", "a.b", "Gradient norm"):
    assert word in parsed.text
  assert "Preference" not in parsed.text  # There is none to show.


def test_needs_no_network_and_no_script(tmp_path):
  text = page(tmp_path)
  assert not re.search(r"https?://|<script|<link|@import|url\(", text)
  sources = re.findall(r'src="([^"]*)"', text)
  prefix = "data:image/svg+xml;base64,"
  assert len(sources) == 4 and all(s.startswith(prefix) for s in sources)
  for source in sources:
    svg = base64.b64decode(source.removeprefix(prefix)).decode()
    root = xml.etree.ElementTree.fromstring(svg)
    links = [v for node in root.iter() for k, v in node.items() if "href" in k]
    assert links and all(link.startswith("#") for link in links)


def test_what_a_model_says_is_escaped(tmp_path):
  evil = "<script>alert('x')</script> & <b>"
  text = page(
    tmp_path,
    title=evil,
    runs=[report.Run(name=evil, history=HISTORY, config={evil: evil})],
    tables=[report.Table(title=evil, columns=[evil], rows=[[evil]])],
  )
  assert "<script" not in text and "<b>" not in text
  assert Parser(text).text.count(evil) >= 5


def test_missing_and_infinite_values_are_left_out():
  history = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None}, {"step": 3}]
  history.append({"step": 4, "loss": math.inf})
  assert list(report.charts(history)) == [("Loss (nats)", {"loss": [(1, 1.0)]})]


def test_a_figure_shows_the_points():
  series = {"mfu": [(1, 0.5), (2, 0.25)], "hfu": [(1, 0.75)]}
  (axes,) = report.figure(series).axes
  drawn = [[tuple(p) for p in line.get_xydata()] for line in axes.lines]
  assert drawn == list(series.values())
  assert axes.get_ylim()[0] == 0.0  # A share is judged from zero.
  assert [line.get_label() for line in axes.lines] == ["mfu 0.25", "hfu 0.75"]


def test_from_run_folders_by_command(tmp_path, monkeypatch, capsys):
  folder = tmp_path / "run"
  folder.mkdir()
  with pytest.raises(ValueError, match=r"run.*no metrics\.jsonl"):
    report.load_run(folder)
  lines = "".join(json.dumps(line) + "\n" for line in HISTORY)
  (folder / monitor.FILE).write_text(lines)
  (folder / "peak.json").write_text('{"source": "4 x TPU v4"}')
  monkeypatch.setattr(sys, "argv", ["report", str(folder)])
  monkeypatch.delitem(sys.modules, "train.report")
  runpy.run_module("train.report", run_name="__main__")
  assert str(folder / "report.html") in capsys.readouterr().out
  assert "Utilisation is of 4 x TPU v4." in (folder / "report.html").read_text()
