"""Draws the pipeline schedules, and prints what each costs.

  python -m sharding.schedule_picture docs/schedules.png

Time runs to the right and is that of a machine whose stages meet after every
tick: a tick lasts as long as its slowest stage.
"""

import sys

import numpy as np

from sharding import schedules
from sharding.buffers import plan
from sharding.schedules import Costs, Schedule

# Legible on a light page and on a dark one; a chunk's shade tells it apart.
_COLORS = (
  ("#4a7de8", "#8fb0f3"),
  ("#e08440", "#edb48a"),
  ("#3fa587", "#3fa587"),
)
_GRAY = "#7d8798"
_LABELS = ("forward", "backward", "weight gradients")


def examples(num_stages: int, num_micro: int) -> list[Schedule]:
  """Every schedule there is."""
  P, M = num_stages, num_micro
  return [
    schedules.gpipe(P, M),
    schedules.one_forward_one_backward(P, M),
    schedules.interleaved(P, M, 2),
    schedules.zero_bubble(P, M),
  ]


def draw(path: str, found: list[Schedule], costs: Costs) -> None:
  """Writes a picture with a panel a schedule.

  Args:
    path: of the file; its ending says in which format.
    found: what to draw.
    costs: widths of the actions.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import patches, pyplot

  colors = ("text.color", "axes.titlecolor", "xtick.color", "ytick.color")
  style = {"font.size": 7} | dict.fromkeys(colors, _GRAY)
  height = sum(schedule.num_stages for schedule in found)
  with pyplot.rc_context(style):
    figure, axes = pyplot.subplots(
      len(found), 1, figsize=(9, 0.27 * height + 0.45 * len(found)), sharex=True
    )
    for axis, schedule in zip(axes, found):
      _panel(axis, schedule, costs)
    axes[0].set_xlim(0, max(schedules.cost(s, costs) for s in found))
    boxes = [
      patches.Patch(color=shades[0], label=label)
      for shades, label in zip(_COLORS, _LABELS)
    ]
    figure.legend(handles=boxes, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=130, transparent=True)
    pyplot.close(figure)


def _panel(axis, schedule: Schedule, costs: Costs) -> None:
  """Draws one schedule: a row a stage, the first on top."""
  widths = np.array([costs.forward, costs.backward, costs.weight])
  if not schedule.split:
    widths[schedules.BACKWARD] += costs.weight
  widths /= schedule.num_chunks
  starts = np.cumsum(schedules.tick_costs(schedule, costs))
  starts = np.concatenate([[0.0], starts])
  for t, s in np.ndindex(schedule.table.shape[:2]):
    left = starts[t]
    for action, (m, c) in enumerate(schedule.table[t, s]):
      if m < 0:
        continue
      width = widths[action]
      color = _COLORS[action][c % 2]
      axis.barh(s, width, left=left, color=color, ec="white", lw=0.4, height=1)
      axis.text(left + width / 2, s, m, ha="center", va="center", color="white")
      left += width
  share = schedules.bubble(schedule, costs)
  axis.set_title(
    f"{schedule.name}: {starts[-1]:g} units of time, {share:.1%} of it bubble",
    loc="left",
  )
  axis.set_ylim(schedule.num_stages - 0.5, -0.5)
  axis.set_yticks(range(schedule.num_stages))
  axis.tick_params(length=0, labelbottom=False)
  axis.spines[:].set_visible(False)


def one_action_a_tick(num_stages: int, num_micro: int) -> Schedule:
  """1F1B as its article draws it; here for what it would cost."""
  P, M = num_stages, num_micro
  sequences = []
  for s in range(P):
    warmup = min(P - s, M)
    actions = [(schedules.FORWARD, m) for m in range(warmup)]
    for m in range(M):
      actions.append((schedules.BACKWARD, m))
      if warmup + m < M:
        actions.append((schedules.FORWARD, warmup + m))
    sequences.append(actions)
  table = schedules.in_order(sequences)
  return Schedule(name="1f1b, 1 action", num_micro=M, num_chunks=1, table=table)


def main(path: str) -> None:
  """Draws, and prints the table."""
  draw(path, examples(4, 8), Costs())
  again = Costs(backward=2.0)
  print("P   M   schedule         bubble  (P-1)/(M+P-1)  F again  buffers")
  for P, M in ((4, 8), (4, 32), (8, 32), (8, 64)):
    for schedule in [one_action_a_tick(P, M), *examples(P, M)]:
      print(
        f"{P:<3} {M:<3} {schedule.name:<16}"
        f" {schedules.bubble(schedule, Costs()):<7.3f}"
        f" {(P - 1) / (M + P - 1):<14.3f}"
        f" {schedules.bubble(schedule, again):<8.3f} {plan(schedule).sizes}"
      )


if __name__ == "__main__":
  if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit(__doc__)
  main(sys.argv[1])
