"""A picture of a scaling law and of the runs that it was fitted to."""

import numpy as np

from plan.scaling_fit import Runs
from plan.scaling_laws import (
  FLOPS_A_TOKEN,
  KAPLAN,
  Chinchilla,
  PowerLaw,
  tokens_a_parameter,
)


def draw(
  path: str,
  runs: Runs,
  law: Chinchilla,
  samples: np.ndarray,
  valleys: PowerLaw | None,
  flops: float,
) -> None:
  """Writes the picture.

  Left, loss over parameters at the budgets of the runs, with the fit. Right,
  the best number of parameters over the budget, with the interval of the
  bootstrap, beside Kaplan's and Chinchilla's.

  Args:
    path: a file; its ending says the format.
    runs: what was fitted.
    law: the fit.
    samples: of its bootstrap, [n, 5].
    valleys: of `scaling_fit.iso_flop`, or None.
    flops: the budget that was asked for.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5))
  budgets = np.geomspace(runs.flops.min(), runs.flops.max(), 8)
  colours = pyplot.get_cmap("viridis")(np.linspace(0, 0.9, len(budgets)))
  near = np.abs(np.log(runs.flops)[:, None] - np.log(budgets)).argmin(axis=1)
  sizes = np.geomspace(runs.params.min() / 2, runs.params.max() * 2, 200)
  for index, (budget, colour) in enumerate(zip(budgets, colours, strict=True)):
    mine = near == index
    if not mine.any():
      continue
    left.plot(runs.params[mine], runs.loss[mine], "o", color=colour, ms=4)
    loss = law.loss(sizes, budget / FLOPS_A_TOKEN / sizes)
    left.plot(sizes, loss, color=colour, lw=1, label=f"{budget:.0e} FLOPs")
  span = runs.loss.max() - runs.loss.min()
  left.set_ylim(runs.loss.min() - 0.1 * span, runs.loss.max() + 0.1 * span)
  left.set(xscale="log", xlabel="parameters", ylabel="loss, nats a token")
  left.set_title("runs and the fit, by compute", loc="left")
  left.legend(fontsize=8, frameon=False)

  wide = np.geomspace(runs.flops.min(), max(runs.flops.max(), flops), 100)
  best = lambda law: law.optimum(wide)[0]
  right.plot(wide, best(law), color="black", label="your runs, parametric")
  if len(samples):
    each = np.array([best(Chinchilla(*sample)) for sample in samples])
    low, high = np.quantile(each, [0.025, 0.975], axis=0)
    right.fill_between(wide, low, high, color="black", alpha=0.15, lw=0)
  others = {
    "Kaplan": KAPLAN,
    "Chinchilla, 20 tokens a parameter": tokens_a_parameter(),
  }
  if valleys is not None:
    others = {"your runs, IsoFLOP": valleys} | others
  for name, other in others.items():
    right.plot(wide, best(other), "--", label=name)
  right.axvline(flops, color="grey", lw=0.8)
  right.plot(flops, law.optimum(flops)[0], "o", color="black")
  right.set(xscale="log", yscale="log", xlabel="FLOPs", ylabel="parameters")
  right.set_title("the best size for a budget", loc="left")
  right.legend(fontsize=8, frameon=False)
  for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
  figure.tight_layout()
  figure.savefig(path, dpi=110)
  pyplot.close(figure)
