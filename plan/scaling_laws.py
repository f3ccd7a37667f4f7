"""How large a model, on how many tokens, for a budget of compute.

  python -m plan.scaling_laws --flops=3.2e23
  python -m plan.scaling_laws --flops=1e21 --runs=runs.csv --plot=laws.png

Kaplan's law (arXiv:2001.08361) and Chinchilla's (arXiv:2203.15556) side by
side, and one fitted to runs of your own: a CSV file with the columns params,
tokens and loss (nats a token). Imports no JAX.
"""

import csv
import dataclasses
import math
import pathlib
import sys
from typing import Protocol

from absl import app, flags

# FLOPs of a token, a parameter, forward and backward: C = 6 N D.
FLOPS_A_TOKEN = 6
PETAFLOP_DAY = 1e15 * 24 * 3600


class Law(Protocol):
  """What every law answers; N parameters, D tokens, C FLOPs."""

  def loss(self, params: float, tokens: float) -> float:
    """Nats a token of a model of N parameters after D tokens."""
    ...

  def optimum(self, flops: float) -> tuple[float, float]:
    """N and D that give the lowest loss for C = 6 N D."""
    ...


def loss_of(law: Law, flops: float) -> float:
  """The lowest loss that so much compute gives."""
  return law.loss(*law.optimum(flops))


@dataclasses.dataclass(frozen=True)
class Chinchilla:
  """L(N, D) = E + A / N^alpha + B / D^beta.

  arXiv:2203.15556, equation 2; the optimum is their equation 4.
  """

  floor: float
  of_params: float
  of_tokens: float
  alpha: float
  beta: float

  def loss(self, params: float, tokens: float) -> float:
    """Nats a token."""
    by_params = self.of_params * params**-self.alpha
    return self.floor + by_params + self.of_tokens * tokens**-self.beta

  def optimum(self, flops: float) -> tuple[float, float]:
    """N = G (C / 6)^(beta / (alpha + beta)), D = C / 6 N."""
    total = self.alpha + self.beta
    ratio = self.alpha * self.of_params / (self.beta * self.of_tokens)
    products = flops / FLOPS_A_TOKEN
    params = ratio ** (1 / total) * products ** (self.beta / total)
    return params, products / params


@dataclasses.dataclass(frozen=True)
class Kaplan:
  """L(N, D) = [(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D.

  arXiv:2001.08361, equation 1.5 and table 2; N is without embeddings. Their
  optimum is not that of this formula for C = 6 N D, but of runs that stop well
  before convergence: N = 1.3e9 C^0.73 with C in PF-days (appendix A, table 6).
  """

  params_scale: float = 8.8e13
  tokens_scale: float = 5.4e13
  alpha: float = 0.076
  beta: float = 0.095
  optimal_params: float = 1.3e9
  optimal_power: float = 0.73

  def loss(self, params: float, tokens: float) -> float:
    """Nats a token."""
    by_params = (self.params_scale / params) ** (self.alpha / self.beta)
    return (by_params + self.tokens_scale / tokens) ** self.beta

  def optimum(self, flops: float) -> tuple[float, float]:
    """N by their fit, D = C / 6 N."""
    days = flops / PETAFLOP_DAY
    params = self.optimal_params * days**self.optimal_power
    return params, flops / FLOPS_A_TOKEN / params


@dataclasses.dataclass(frozen=True)
class PowerLaw:
  """N = k C^a, D = C / 6 N: an optimum without a loss."""

  factor: float
  power: float

  def optimum(self, flops: float) -> tuple[float, float]:
    """N and D."""
    params = self.factor * flops**self.power
    return params, flops / FLOPS_A_TOKEN / params


def tokens_a_parameter(ratio: float = 20.0) -> PowerLaw:
  """D = `ratio` N: what Chinchilla's paper amounts to (its tables 3 and A9)."""
  return PowerLaw((FLOPS_A_TOKEN * ratio) ** -0.5, 0.5)


KAPLAN = Kaplan()
# Constants of arXiv:2203.15556, section 3.3. Rounded as they are, they give
# fewer parameters than the paper's own tables.
HOFFMANN = Chinchilla(1.69, 406.4, 410.7, 0.34, 0.28)
# Fitted to the same runs again, with intervals that fit: arXiv:2404.10102.
BESIROGLU = Chinchilla(1.8172, 482.01, 2085.43, 0.3478, 0.3658)

LAWS = {
  "Kaplan 2020": KAPLAN,
  "Chinchilla, 20 tokens a parameter": tokens_a_parameter(),
  "Chinchilla, approach 3 as published": HOFFMANN,
  "Chinchilla, approach 3 refitted": BESIROGLU,
}


def read_runs(path: str):
  """The runs of a CSV file.

  Raises:
    ValueError: a column is missing, or a value is no positive number.
  """
  import numpy as np

  from plan.scaling_fit import Runs

  columns = ("params", "tokens", "loss")
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--runs: there is no file {path!r}")
  with open(path, newline="") as file:
    rows = list(csv.DictReader(file))
  missing = [name for name in columns if not rows or name not in rows[0]]
  if missing:
    raise ValueError(f"--runs: {path!r} lacks the columns {missing}")
  try:
    return Runs(*(np.array([float(r[name]) for r in rows]) for name in columns))
  except (TypeError, ValueError) as error:
    raise ValueError(f"--runs: {path!r}: {error}") from error


def side_by_side(laws: dict[str, Law | PowerLaw], flops: float) -> str:
  """A table: the optimum of each law for one budget, and its loss.

  A law's loss is that of its authors' text and tokenizer: compare it with no
  other law's.
  """
  lines = [
    f"{f'{flops:.3g} FLOPs':<38}{'parameters':>11}{'tokens':>11}"
    f"{'tokens/par.':>12}{'loss':>8}"
  ]
  for name, law in laws.items():
    params, tokens = law.optimum(flops)
    loss = f"{law.loss(params, tokens):.3f}" if hasattr(law, "loss") else ""
    lines.append(
      f"{name:<38}{params:>11.3g}{tokens:>11.3g}{tokens / params:>12.3g}"
      f"{loss:>8}"
    )
  return "\n".join(lines)


def main(argv) -> None:
  """Prints the laws for a budget; fits, and draws, if asked."""
  if len(argv) > 1:
    sys.exit(f"error: wanted flags alone, got {argv[1:]}")
  try:
    print(_answer(flags.FLAGS))
  except ValueError as error:
    sys.exit(f"error: {error}")


def _answer(asked) -> str:
  flops = asked.flops
  if flops is None or not 0 < flops < math.inf:
    raise ValueError(f"--flops must be a positive number, got {flops}")
  if asked.plot and not asked.runs:
    raise ValueError("--plot draws a fit: give --runs as well")
  laws, text = dict(LAWS), []
  if asked.runs:
    from plan import scaling_fit, scaling_plot

    runs = read_runs(asked.runs)
    law, samples = scaling_fit.fit(runs, num_samples=asked.samples)
    laws["your runs, parametric"] = law
    text += ["", _with_intervals(law, scaling_fit.interval(samples))]
    valleys = None
    try:
      valleys, more = scaling_fit.iso_flop(runs, num_samples=asked.samples)
      laws["your runs, IsoFLOP"] = valleys
      low, high = scaling_fit.interval(more)[:, 1]
      text.append(
        f"IsoFLOP: N ~ C^{valleys.power:.3f} ({low:.3f} to {high:.3f})"
      )
    except ValueError as error:
      text.append(f"IsoFLOP: not fitted: {error}")
    if asked.plot:
      scaling_plot.draw(asked.plot, runs, law, samples, valleys, flops)
      text.append(f"drawn: {asked.plot}")
  return "\n".join([side_by_side(laws, flops), *text])


def _with_intervals(law: Chinchilla, found) -> str:
  """The constants of a fit, with 95 % intervals."""
  lines = ["fitted, 95 % of a bootstrap over runs:"]
  names = ("E", "A", "B", "alpha", "beta")
  for name, value, low, high in zip(
    names, dataclasses.astuple(law), *found, strict=True
  ):
    lines.append(f"  {name:<6}{value:>10.4g}   {low:.4g} to {high:.4g}")
  return "\n".join(lines)


if __name__ == "__main__":
  flags.DEFINE_float("flops", None, "the budget, C")
  flags.DEFINE_string("runs", None, "a CSV file: params,tokens,loss")
  flags.DEFINE_string("plot", None, "a file for a picture of the fit")
  flags.DEFINE_integer("samples", 1000, "of the bootstrap")
  app.run(main)
