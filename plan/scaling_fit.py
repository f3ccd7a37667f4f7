"""Fits scaling laws to runs: what loss so many parameters and tokens gave.

Two methods of Hoffmann et al. (arXiv:2203.15556): the parametric fit (section
3.3), and the valleys of equal compute, IsoFLOP (section 3.2). Intervals are of
a bootstrap over runs; all its samples are fitted at once. Imports no JAX.
"""

import dataclasses

import numpy as np

from plan.scaling_laws import FLOPS_A_TOKEN, Chinchilla, PowerLaw

# Of the residual of log loss (arXiv:2203.15556, appendix D.3).
_HUBER = 1e-3
_ITERATIONS = 200


@dataclasses.dataclass(frozen=True)
class Runs:
  """What was measured, float64 [n] each.

  Attributes:
    params: N.
    tokens: D.
    loss: nats a token, on held-out text.
  """

  params: np.ndarray
  tokens: np.ndarray
  loss: np.ndarray

  def __post_init__(self):
    sizes = {len(self.params), len(self.tokens), len(self.loss)}
    if len(sizes) > 1:
      raise ValueError(f"runs have columns of equal length, got {sizes}")
    for name in ("params", "tokens", "loss"):
      values = getattr(self, name)
      if not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError(f"runs: every {name!r} must be a positive number")

  @property
  def flops(self) -> np.ndarray:
    """C = 6 N D."""
    return FLOPS_A_TOKEN * self.params * self.tokens


def fit(
  runs: Runs, *, num_samples: int = 0, seed: int = 0
) -> tuple[Chinchilla, np.ndarray]:
  """The parametric fit, L = E + A / N^alpha + B / D^beta.

  It minimises the sum of Huber(log L - log of the formula), by Levenberg and
  Marquardt's method with the weights of that loss. It starts from the best of
  a grid of (alpha, beta), for each of which the other three are a linear
  problem.

  Args:
    runs: at least six.
    num_samples: of the bootstrap over runs.
    seed: of the bootstrap.

  Returns:
    The law, and [num_samples, 5]: E, A, B, alpha, beta of every sample.

  Raises:
    ValueError: there are too few runs, or they do not tell N from D.
  """
  n = len(runs.loss)
  if n < 6:
    raise ValueError(f"five constants want at least 6 runs, got {n}")
  x, y, z = np.log(runs.params), np.log(runs.tokens), np.log(runs.loss)
  middle = x.mean(), y.mean()
  x, y = x - middle[0], y - middle[1]
  design = np.stack([np.ones(n), x, y], axis=1)
  if np.linalg.matrix_rank(design, tol=1e-6) < 3:
    raise ValueError(
      "runs must vary parameters and tokens independently: several sizes, each"
      " with several numbers of tokens"
    )
  everything = np.ones((1, n))
  starts = _starts(x, y, z)
  theta = np.concatenate(
    [_minimise(start[None], x, y, z, everything) for start in starts]
  )
  costs = _costs(theta, x, y, z, everything)
  best = theta[np.argmin(costs)]
  found = _constants(best[None], *middle)[0]
  law = Chinchilla(*map(float, found))
  if not num_samples:
    return law, np.empty((0, 5))
  counts = _resampled(n, num_samples, seed)
  first = np.repeat(best[None], num_samples, axis=0)
  samples = _minimise(first, x, y, z, counts)
  return law, _constants(samples, *middle)


def iso_flop(
  runs: Runs, *, num_samples: int = 0, seed: int = 0
) -> tuple[PowerLaw, np.ndarray]:
  """N that is best for C, N = k C^a, from the valleys of equal compute.

  Runs whose C = 6 N D differ by less than 10 % are one budget; through the loss
  of each goes a parabola in log N, and through their minima a power law.

  Args:
    runs: several budgets, each with at least four sizes.
    num_samples: of the bootstrap, over the runs of each budget.
    seed: of the bootstrap.

  Returns:
    The law, and [num_samples, 2]: k, a of every sample. A sample without a
    valley is left out.

  Raises:
    ValueError: fewer than two budgets have a valley.
  """
  order = np.argsort(runs.flops)
  logs = np.log(runs.flops[order])
  groups = np.split(order, np.flatnonzero(np.diff(logs) > np.log(1.1)) + 1)
  groups = [group for group in groups if len(group) >= 4]
  rows = num_samples + 1
  budgets, valleys = [], []
  for index, group in enumerate(groups):
    x = np.log(runs.params[group])
    counts = np.ones((rows, len(group)))
    counts[1:] = _resampled(len(group), rows - 1, (seed, index))
    valley = _valley(x, runs.loss[group], counts)
    if np.isfinite(valley[0]):
      budgets.append(np.log(runs.flops[group]).mean())
      valleys.append(valley)
  if len(budgets) < 2:
    raise ValueError(
      "IsoFLOP wants at least 2 budgets C = 6 N D of 4 or more sizes each, with"
      f" a loss that falls and rises again; got {len(budgets)} of those"
    )
  c, v = np.array(budgets), np.array(valleys)
  c_mean = c.mean()
  slope = ((c - c_mean)[:, None] * v).sum(axis=0) / ((c - c_mean) ** 2).sum()
  k = np.exp(v.mean(axis=0) - slope * c_mean)
  found = np.stack([k, slope], axis=1)
  samples = found[1:]
  return PowerLaw(*map(float, found[0])), samples[
    np.isfinite(samples).all(axis=1)
  ]


def interval(samples: np.ndarray, level: float = 0.95) -> np.ndarray:
  """The middle `level` of each column, [2, columns]."""
  tail = (1 - level) / 2
  return np.quantile(samples, [tail, 1 - tail], axis=0)


def _resampled(n: int, num_samples: int, seed) -> np.ndarray:
  """How often each run is drawn, [num_samples, n]."""
  rng = np.random.default_rng(seed)
  return rng.multinomial(n, np.full(n, 1 / n), size=num_samples).astype(float)


def _valley(x: np.ndarray, loss: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """Where weighted parabolas through (x, loss) are lowest, [rows].

  NaN where one has no lowest point among its runs.
  """
  middle = x.mean()
  powers = (x - middle)[:, None] ** np.arange(3)
  gram = np.einsum("sn,ni,nj->sij", counts, powers, powers)
  # Less than three sizes drawn: no parabola.
  gram += 1e-12 * np.eye(3)
  right = np.einsum("sn,ni,n->si", counts, powers, loss)
  c = np.linalg.solve(gram, right[..., None])[..., 0]
  enough = (counts > 0).sum(axis=1) >= 3
  with np.errstate(divide="ignore", invalid="ignore"):
    lowest = middle - c[:, 1] / (2 * c[:, 2])
  among = (lowest >= x.min()) & (lowest <= x.max())
  return np.where((c[:, 2] > 0) & enough & among, lowest, np.nan)


# Within the fit a law is (a, b, e, alpha, beta), with logs of its factors at
# the mean of log N and of log D.


def _constants(theta, x_mean, y_mean) -> np.ndarray:
  """E, A, B, alpha, beta, [rows, 5]."""
  a, b, e, alpha, beta = theta.T
  factors = np.exp([e, a + alpha * x_mean, b + beta * y_mean])
  return np.stack([*factors, alpha, beta], axis=1)


def _starts(x, y, z, *, num_starts: int = 6) -> np.ndarray:
  """The best of a grid, [num_starts, 5]."""
  exponents = np.geomspace(0.05, 1.2, 14)
  found = []
  for alpha in exponents:
    for beta in exponents:
      columns = np.stack([np.exp(-alpha * x), np.exp(-beta * y), 1 + 0 * x], 1)
      # Relative errors, and factors that are positive.
      scaled = columns / np.exp(z)[:, None]
      factors = np.linalg.lstsq(scaled, np.ones(len(x)), rcond=None)[0]
      factors = np.maximum(factors, 1e-3)
      found.append([*np.log(factors), alpha, beta])
  theta = np.array(found)
  costs = _costs(theta, x, y, z, np.ones((1, len(x))))
  return theta[np.argsort(costs)[:num_starts]]


def _parts(theta, x, y):
  """The three terms' logs, [rows, n, 3], and the logs of their sums."""
  a, b, e, alpha, beta = (column[:, None] for column in theta.T)
  logs = np.stack([a - alpha * x, b - beta * y, e + 0 * x], axis=-1)
  top = logs.max(axis=-1)
  total = top + np.log(np.exp(logs - top[..., None]).sum(axis=-1))
  return logs, total


def _costs(theta, x, y, z, counts) -> np.ndarray:
  """The sums of Huber losses, [rows]."""
  size = np.abs(_parts(theta, x, y)[1] - z)
  inside = np.minimum(size, _HUBER)
  return (counts * inside * (size - inside / 2)).sum(axis=1)


def _minimise(theta, x, y, z, counts) -> np.ndarray:
  """Levenberg-Marquardt on every row: laws [rows, 5], weights [rows, n]."""
  theta = theta.copy()
  damping = np.full(len(theta), 1e-3)
  cost = _costs(theta, x, y, z, counts)
  active = np.arange(len(theta))
  for _ in range(_ITERATIONS):
    now, weights = theta[active], counts[active if len(counts) > 1 else [0]]
    logs, total = _parts(now, x, y)
    residual = total - z
    shares = np.exp(logs - total[..., None])
    slopes = [
      shares, -(shares[..., :1] * x[:, None]), -(shares[..., 1:2] * y[:, None])
    ]  # fmt: skip
    jacobian = np.concatenate(slopes, axis=-1)
    weights = weights * _HUBER / np.maximum(np.abs(residual), _HUBER)
    weighted = jacobian * weights[..., None]
    gram = weighted.transpose(0, 2, 1) @ jacobian
    gradient = np.einsum("sni,sn->si", weighted, residual)
    diagonal = np.einsum("sii->si", gram) + 1e-12
    damped = gram + np.eye(5) * (damping[active, None] * diagonal)[:, None]
    step = np.linalg.solve(damped, gradient[..., None])[..., 0]
    new = now - np.clip(step, -1.0, 1.0)
    mine = counts[active] if len(counts) > 1 else counts
    new_cost = _costs(new, x, y, z, mine)
    better = new_cost < cost[active]
    gain = np.where(better, cost[active] - new_cost, 0.0)
    done = better & (gain < 1e-7 * cost[active])
    done |= ~better & (damping[active] > 1e7)
    rows = active[better]
    theta[rows], cost[rows] = new[better], new_cost[better]
    damping[active] *= np.where(better, 0.3, 4.0)
    damping = np.maximum(damping, 1e-9)
    active = active[~done]
    if not len(active):
      break
  return theta
