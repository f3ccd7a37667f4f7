"""report.html: the curves and the settings of one or several runs, in one file.

  python -m train.report RUN_FOLDER [RUN_FOLDER ...]

The page needs no network and no script: curves are inline SVG.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence

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
_WIDTH, _HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 8, 22
# Their axes start at 0: noise should look as small as it is.
_FROM_ZERO = ("tokens_per_second", "mfu", "mfu_full", "hfu")


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
        "charts": list(charts(run.history)),
        "settings": settings(run.config),
      }
      for run in runs
    ],
  )
  pathlib.Path(path).write_text(page)


def charts(history: Sequence[Mapping]):
  """Yields what the template draws, for each chart that has values."""
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
      yield _chart(title, series)


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


def ticks(low: float, high: float, count: int = 4) -> list[float]:
  """Round numbers within [low, high], about `count` of them."""
  wanted = (high - low) / count
  power = 10.0 ** math.floor(math.log10(wanted))
  nearness = lambda step: abs(math.log(step / wanted))
  step = min((power * m for m in (1, 2, 5, 10)), key=nearness)
  first = math.ceil(low / step - 1e-9)
  last = math.floor(high / step + 1e-9)
  return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _chart(title: str, series: Mapping[str, Sequence[tuple]]) -> dict:
  """Lines and axes in SVG coordinates."""
  xs = [x for points in series.values() for x, _ in points]
  left, right = _span(xs)
  ys = [y for points in series.values() for _, y in points]
  if all(name in _FROM_ZERO for name in series):
    ys.append(0.0)
  bottom, top = _span(ys)
  place_x = lambda x: round(
    _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT), 1
  )
  place_y = lambda y: round(
    _HEIGHT
    - _BOTTOM
    - (y - bottom) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM),
    1,
  )
  return {
    "title": title,
    "width": _WIDTH,
    "height": _HEIGHT,
    "left": _LEFT,
    "right": _WIDTH - _RIGHT,
    "bottom": _HEIGHT - _BOTTOM,
    "x_ticks": [(place_x(x), f"{x:g}") for x in ticks(left, right)],
    "y_ticks": [(place_y(y), _number(y)) for y in ticks(bottom, top)],
    "lines": [
      {
        "name": name.replace("_", " "),
        "last": _number(points[-1][1]),
        "points": " ".join(f"{place_x(x)},{place_y(y)}" for x, y in points),
        "dots": [(place_x(x), place_y(y)) for x, y in points]
        if len(points) <= 12
        else [],
      }
      for name, points in series.items()
    ],
  }


def _span(values: Sequence[float]) -> tuple[float, float]:
  """The range of an axis: that of the values, never empty."""
  low, high = min(values), max(values)
  if high - low <= 1e-9 * max(abs(low), abs(high), 1e-30):
    margin = abs(low) / 2 or 1.0
    return low - margin, high + margin
  return low, high


def _number(value: float) -> str:
  """Short, for axes and legends."""
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
