"""report.html: the curves and the settings of one or several runs, in one file.

  python -m train.report RUN_FOLDER [RUN_FOLDER ...]

The page needs no network and no script: curves are SVG images within it.
"""

import base64
import dataclasses
import io
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence

_TEMPLATE = pathlib.Path(__file__).with_name("report.html.jinja")

# Key in metrics.jsonl -> title of its chart; the keys of one title share it.
_CHARTS = {
  "Loss (nats)": ("loss", "held_out_loss"),
  "Held-out bits per byte": ("held_out_bits_per_byte",),
  "Preference accuracy": (
    "preference_accuracy",
    "held_out_preference_accuracy",
  ),
  "Gradient norm": ("grad_norm",),
  "Throughput (tokens a second)": ("tokens_per_second",),
  "Model FLOPs utilisation": ("mfu", "mfu_full", "hfu"),
  "Learning rate": ("learning_rate",),
}
# Their axes start at 0: noise should look as small as it is.
_FROM_ZERO = ("tokens_per_second", "mfu", "mfu_full", "hfu")
# Legible on a light page and on a dark one.
_COLORS = ("#4a7de8", "#e08440", "#3fa587")
_GRAY = "#7d8798"
_STYLE = {
  "axes.edgecolor": _GRAY,
  "axes.grid": True,
  "axes.grid.axis": "y",
  "axes.spines.right": False,
  "axes.spines.top": False,
  "font.family": "sans-serif",
  "font.size": 8,
  "grid.alpha": 0.3,
  "grid.color": _GRAY,
  "legend.frameon": False,
  "legend.labelcolor": _GRAY,
  "lines.linewidth": 1.2,
  "lines.markersize": 3,
  "svg.fonttype": "none",
  "xtick.color": _GRAY,
  "ytick.color": _GRAY,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What the page shows of a run.

  Attributes:
    name: heading.
    history: lines of metrics.jsonl.
    config: as JSON holds it; may be empty.
    note: a sentence under the heading.
  """

  name: str
  history: Sequence[Mapping]
  config: Mapping
  note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
  """A section of text in rows and columns, such as answers side by side.

  Attributes:
    title: heading.
    columns: their heads.
    rows: cells; they are escaped, and their line breaks kept.
    note: a sentence under the heading.
  """

  title: str
  columns: Sequence[str]
  rows: Sequence[Sequence[str]]
  note: str = ""


def load_run(folder: str | pathlib.Path, *, name: str | None = None) -> Run:
  """Reads a run folder.

  Raises:
    ValueError: it has no metrics.jsonl.
  """
  from train import monitor  # Here: it imports JAX, and --help must not.

  folder = pathlib.Path(folder)
  history = monitor.read(folder / monitor.FILE)
  if not history:
    raise ValueError(f"{folder} is no run folder: it has no {monitor.FILE}")
  config, peak = folder / "config.json", folder / monitor.PEAK_FILE
  note = ""
  if peak.is_file():
    note = f"Utilisation is of {json.loads(peak.read_text())['source']}."
  return Run(
    name=name or folder.name,
    history=history,
    config=json.loads(config.read_text()) if config.is_file() else {},
    note=note,
  )


def write(
  path: str | pathlib.Path,
  runs: Sequence[Run],
  *,
  title: str,
  summary: Mapping[str, str] | None = None,
  tables: Sequence[Table] = (),
) -> None:
  """Writes the page.

  Args:
    path: of the file.
    runs: in order; each gets its curves and settings.
    title: of the page.
    summary: a few figures at the top, label -> value.
    tables: sections between the figures and the runs.
  """
  import jinja2

  environment = jinja2.Environment(
    autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
  )
  page = environment.from_string(_TEMPLATE.read_text()).render(
    title=title,
    summary=summary or {},
    tables=tables,
    runs=[
      {
        "name": run.name,
        "note": run.note,
        "charts": [
          {"title": title, "image": _image(title, series)}
          for title, series in charts(run.history)
        ],
        "settings": settings(run.config),
      }
      for run in runs
    ],
  )
  pathlib.Path(path).write_text(page)


def charts(
  history: Sequence[Mapping],
) -> Iterator[tuple[str, dict[str, list[tuple]]]]:
  """Yields the title and the series of each chart that has values.

  A series is a list of (step, value), by its key in metrics.jsonl.
  """
  for title, keys in _CHARTS.items():
    series = {}
    for key in keys:
      points = [
        (line["step"], line[key])
        for line in history
        if isinstance(line.get(key), int | float) and math.isfinite(line[key])
      ]
      if points:
        series[key] = points
    if series:
      yield title, series


def settings(config: Mapping, prefix: str = "") -> dict[str, str]:
  """Dotted key -> value of a nested config."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, Mapping):
      flat |= settings(value, f"{prefix}{key}.")
    elif isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
      for i, item in enumerate(value):
        flat |= settings(item, f"{prefix}{key}.{i}.")
    else:
      flat[prefix + key] = json.dumps(value)
  return flat


def figure(series: Mapping[str, Sequence[tuple]]):
  """Draws a chart; returns a matplotlib figure."""
  from matplotlib.figure import Figure

  chart = Figure(figsize=(4.2, 2.2), layout="constrained")
  axes = chart.subplots()
  for (name, points), color in zip(series.items(), _COLORS, strict=False):
    axes.plot(
      *zip(*points, strict=True),
      color=color,
      marker="o" if len(points) <= 12 else None,
      label=f"{name.replace('_', ' ')} {_number(points[-1][1])}",
    )
  if all(name in _FROM_ZERO for name in series):
    axes.set_ylim(bottom=0)
  chart.legend(loc="outside lower left", ncols=3)
  return chart


def _image(title: str, series: Mapping[str, Sequence[tuple]]) -> str:
  """The chart as a data URI."""
  import matplotlib

  svg = io.BytesIO()
  with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):
    figure(series).savefig(
      svg, format="svg", transparent=True, metadata={"Date": None}
    )
  return (
    "data:image/svg+xml;base64," + base64.b64encode(svg.getvalue()).decode()
  )


def _number(value: float) -> str:
  """Short, for legends."""
  if value == 0 or 1e-3 <= abs(value) < 1e4:
    return f"{value:.4g}"
  return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.3g}"


if __name__ == "__main__":
  folders = sys.argv[1:]
  if not folders or folders[0].startswith("-"):
    sys.exit(__doc__)
  target = pathlib.Path(folders[0]) / "report.html"
  write(target, [load_run(folder) for folder in folders], title="Training")
  print(target)
