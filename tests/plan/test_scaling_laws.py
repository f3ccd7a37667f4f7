"""Scaling laws: published tables, planted constants, brute force."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from plan import scaling_laws
from plan.scaling_fit import Runs, fit, interval, iso_flop
from plan.scaling_laws import BESIROGLU, HOFFMANN, KAPLAN, loss_of

# arXiv:2203.15556, table 3: parameters, FLOPs, tokens.
CHINCHILLA_TABLE = [
  (400e6, 1.92e19, 8.0e9),
  (1e9, 1.21e20, 20.2e9),
  (10e9, 1.23e22, 205.1e9),
  (67e9, 5.76e23, 1.5e12),
  (175e9, 3.85e24, 3.7e12),
  (280e9, 9.90e24, 5.9e12),
  (520e9, 3.43e25, 11.0e12),
  (1e12, 1.27e26, 21.2e12),
  (10e12, 1.30e28, 216.2e12),
]


@pytest.mark.parametrize("row", CHINCHILLA_TABLE, ids=str)
def test_the_published_table_within_ten_percent(row):
  params, flops, tokens = row
  found = scaling_laws.tokens_a_parameter().optimum(flops)
  np.testing.assert_allclose(found, (params, tokens), rtol=0.1)


@pytest.mark.parametrize("law", [HOFFMANN, BESIROGLU])
@pytest.mark.parametrize("flops", [1e18, 3.2e23])
def test_the_optimum_is_that_of_brute_force(law, flops):
  params = np.geomspace(1e6, 1e14, 200_001)
  tokens = flops / 6 / params
  best = np.argmin(law.loss(params, tokens))
  found = law.optimum(flops)
  np.testing.assert_allclose(found, (params[best], tokens[best]), rtol=1e-3)
  assert 6 * found[0] * found[1] == pytest.approx(flops)
  assert loss_of(law, flops) == pytest.approx(law.loss(*found))


def test_kaplans_formulas_at_their_limits():
  """arXiv:2001.08361, equations 1.1 and 1.2, and table 6."""
  assert KAPLAN.loss(1e9, 1e30) == pytest.approx((8.8e13 / 1e9) ** 0.076)
  assert KAPLAN.loss(1e30, 1e9) == pytest.approx((5.4e13 / 1e9) ** 0.095)
  params, tokens = KAPLAN.optimum(8.64e19)  # One PF-day.
  assert params == pytest.approx(1.3e9)
  # Their D = 2e10 C^0.27 counts tokens once; C = 6 N D gives the half.
  assert tokens == pytest.approx(1.1e10, rel=0.02)
  more = KAPLAN.optimum(8.64e21)[0]
  assert more / params == pytest.approx(100**0.73)


def test_kaplan_wants_larger_models_than_chinchilla():
  params, tokens = KAPLAN.optimum(5.76e23)
  theirs = scaling_laws.tokens_a_parameter().optimum(5.76e23)
  assert params > 5 * theirs[0] and tokens < theirs[1] / 5


TRUTH = np.array(dataclasses.astuple(BESIROGLU))


def planted(seed, *, noise=0.003, num_budgets=8, num_sizes=10) -> Runs:
  """Runs around the valleys of several budgets, with noise of log loss."""
  rng = np.random.default_rng(seed)
  params, tokens = [], []
  for flops in np.geomspace(1e18, 1e22, num_budgets):
    n = BESIROGLU.optimum(flops)[0] * np.geomspace(0.2, 5, num_sizes)
    params.append(n)
    tokens.append(flops / 6 / n)
  params, tokens = np.concatenate(params), np.concatenate(tokens)
  loss = BESIROGLU.loss(params, tokens)
  return Runs(params, tokens, loss * np.exp(rng.normal(0, noise, len(loss))))


def test_without_noise_the_planted_constants_are_found():
  law, _ = fit(planted(0, noise=0.0))
  np.testing.assert_allclose(dataclasses.astuple(law), TRUTH, rtol=1e-5)
  valleys, _ = iso_flop(planted(0, noise=0.0))
  power = BESIROGLU.beta / (BESIROGLU.alpha + BESIROGLU.beta)
  assert valleys.power == pytest.approx(power, abs=1e-3)
  # A parabola is no hyperbolic valley: the size is off by a few per cent.
  want = BESIROGLU.optimum(1e20)[0]
  assert valleys.optimum(1e20)[0] == pytest.approx(want, rel=0.05)


def test_one_wild_run_moves_little():
  """What Huber's loss is for."""
  runs = planted(1, noise=0.001)
  loss = runs.loss.copy()
  loss[11] *= 1.3
  spoilt, _ = fit(dataclasses.replace(runs, loss=loss))
  clean, _ = fit(runs)
  ours, theirs = dataclasses.astuple(spoilt), dataclasses.astuple(clean)
  np.testing.assert_allclose(ours[0], theirs[0], rtol=5e-3)
  np.testing.assert_allclose(ours[3:], theirs[3:], rtol=3e-2)


def coverage(num_fits: int, num_samples: int) -> np.ndarray:
  """How often the 95 % interval of each constant holds the planted one."""
  hits = []
  for seed in range(num_fits):
    _, samples = fit(planted(seed), num_samples=num_samples, seed=seed)
    low, high = interval(samples)
    hits.append((low <= TRUTH) & (high >= TRUTH))
  return np.mean(hits, axis=0)


def test_intervals_cover():
  """25 fits: 95 % less four standard deviations of such a count."""
  assert np.all(coverage(25, 100) >= 0.77)


@pytest.mark.slow
def test_intervals_cover_the_planted_constants_in_90_to_99_percent():
  found = coverage(200, 400)
  assert np.all((found >= 0.90) & (found <= 0.99)), found


@pytest.mark.slow
def test_intervals_of_iso_flop_cover_the_power():
  power = BESIROGLU.beta / (BESIROGLU.alpha + BESIROGLU.beta)
  hits = []
  for seed in range(200):
    _, samples = iso_flop(planted(seed), num_samples=400, seed=seed)
    low, high = interval(samples)[:, 1]
    hits.append(low <= power <= high)
  assert 0.90 <= np.mean(hits) <= 0.99


def test_samples_are_a_function_of_the_seed():
  runs = planted(2)
  ours, theirs = (fit(runs, num_samples=5, seed=3)[1] for _ in range(2))
  np.testing.assert_array_equal(ours, theirs)
  assert not np.array_equal(ours, fit(runs, num_samples=5, seed=4)[1])


def test_runs_that_say_too_little_are_refused():
  runs = planted(0)
  few = Runs(runs.params[:5], runs.tokens[:5], runs.loss[:5])
  with pytest.raises(ValueError, match="at least 6 runs, got 5"):
    fit(few)
  with pytest.raises(ValueError, match="vary parameters and tokens"):
    fit(dataclasses.replace(runs, tokens=20 * runs.params))
  with pytest.raises(ValueError, match="at least 2 budgets"):
    iso_flop(few)
  with pytest.raises(ValueError, match="'loss' must be a positive number"):
    dataclasses.replace(runs, loss=-runs.loss)


def command(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "plan.scaling_laws", *arguments],
    capture_output=True,
    text=True,
  )


def test_the_command_line(tmp_path):
  runs = planted(0)
  path, plot = tmp_path / "runs.csv", tmp_path / "laws.png"
  rows = zip(runs.params, runs.tokens, runs.loss, strict=True)
  lines = ["params,tokens,loss", *(",".join(map(str, row)) for row in rows)]
  path.write_text("\n".join(lines))
  got = command(
    "--flops=3.2e23", f"--runs={path}", f"--plot={plot}", "--samples=50"
  )
  assert got.returncode == 0, got.stderr
  for name in ("Kaplan 2020", "your runs, parametric", "your runs, IsoFLOP"):
    assert name in got.stdout
  # 3.2e23 FLOPs at 20 tokens a parameter: 52B parameters, 1.0T tokens.
  assert "5.16e+10   1.03e+12          20" in got.stdout
  assert plot.stat().st_size > 20_000


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ([], "--flops must be a positive number, got None"),
    (["--flops=-1"], "--flops must be a positive number"),
    (["--flops=1e20", "--plot=x.png"], "give --runs as well"),
    (["--flops=1e20", "--runs=nowhere.csv"], "there is no file"),
  ],
)
def test_bad_flags(arguments, words):
  got = command(*arguments)
  assert got.returncode == 1 and words in got.stderr
