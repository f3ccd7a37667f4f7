"""What a pretraining run costs: chip-hours, days, money, energy.

  python -m plan.cost --config=configs/smollm2_135m.py:v5e-256 \
    --topology=v5e:16x16 --mfu=0.4 [--prices=FILE] [--batch=ROWS]

Prices, watts and the shares of the stages are in `plan/prices.json`; --prices
names a copy of it with yours.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from configs import cli
from plan.chips import Topology, parse
from train.run_config import PretrainConfig

PRICES = pathlib.Path(__file__).with_name("prices.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """Of some work on some machine.

  Attributes:
    flops: of the model.
    chip_hours: of all chips together.
    days: on the clock.
    usd: for the chips.
    kwh: with hosts, switches and cooling.
  """

  flops: float
  chip_hours: float
  days: float
  usd: float
  kwh: float

  def times(self, factor: float) -> "Cost":
    """Of so many times the work, on the same machine."""
    values = dataclasses.asdict(self).items()
    return Cost(**{name: factor * value for name, value in values})


def cost(
  flops: float, machine: Topology, *, mfu: float, prices: Mapping[str, Any]
) -> Cost:
  """Prices a number of model FLOPs.

  Args:
    flops: of the model, without what is computed again.
    machine: on which they run, in bfloat16.
    mfu: the share of the chips' peak that they reach.
    prices: from `read_prices`.

  Raises:
    ValueError: no such share, or a chip without a price.
  """
  if not 0 < mfu <= 1:
    raise ValueError(f"--mfu must be above 0 and at most 1, got {mfu}")
  chip = machine.chip
  if chip.name not in prices["chips"]:
    raise ValueError(
      f"--prices has no {chip.name!r}; it has {sorted(prices['chips'])}"
    )
  price = prices["chips"][chip.name]
  hours = flops / (mfu * chip.flops["bfloat16"]) / 3600
  return Cost(
    flops=flops,
    chip_hours=hours,
    days=hours / machine.num_devices / 24,
    usd=hours * price["usd_per_hour"],
    kwh=hours * price["watts"] * prices["server_factor"] / 1000,
  )


def read_prices(path: str | pathlib.Path = PRICES) -> dict[str, Any]:
  """Reads a table of prices.

  Raises:
    ValueError: no such file, no such table, or shares that are no whole.
  """
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--prices: there is no file {str(path)!r}")
  try:
    prices = json.loads(pathlib.Path(path).read_text())
    for name in ("money", "compute"):
      if not math.isclose(sum(prices[name].values()), 1.0, abs_tol=1e-6):
        raise ValueError(f"the shares of {name!r} must add up to 1")
    numbers = [prices["server_factor"]]
    for row in prices["chips"].values():
      numbers += [row["usd_per_hour"], row["watts"]]
    if min(map(float, numbers)) < 0:
      raise ValueError("a price or a power is negative")
  except (KeyError, TypeError, AttributeError, ValueError) as error:
    raise ValueError(
      f"--prices: {str(path)!r} is no table like {PRICES}: {error!r}"
    ) from error
  return prices


def split(pretraining: Cost, shares: Mapping[str, float]) -> dict[str, Cost]:
  """The stages of a life whose pretraining costs this.

  Args:
    pretraining: its cost.
    shares: stage -> its part of all; "pretraining" is one of them.
  """
  whole = pretraining.times(1 / shares["pretraining"])
  return {stage: whole.times(share) for stage, share in shares.items()}


def effective_batch(rows: int, accumulation: int, num_replicas: int) -> int:
  """Rows of a step: of a micro-batch on a replica, times both.

  Replicas are the devices that see different rows: tensor, context and pipeline
  parallelism make none.
  """
  return rows * accumulation * num_replicas


def scaled_rates(rate: float, batch: float, new_batch: float) -> dict:
  """The learning rate for another batch.

  "linear": for SGD with warm-up, up to the critical batch (arXiv:1706.02677);
  "square root": for Adam (arXiv:2205.10287).
  """
  factor = new_batch / batch
  return {"linear": rate * factor, "square root": rate * factor**0.5}


def run(
  config: PretrainConfig,
  topology: str | None = None,
  mfu: str | None = None,
  prices: str | None = None,
  batch: str | None = None,
) -> Cost:
  """Prints what a run costs, the stages after it, batch and learning rate.

  Args:
    config: the run.
    topology: of the machine, see `plan.chips.parse`.
    mfu: model FLOPs utilisation; None: 0.4.
    prices: a file; None: `plan/prices.json`.
    batch: rows a step for which the learning rate is wanted, too.

  Raises:
    ValueError: a flag that cannot be, or a run that does not fit the machine.
  """
  from model.accounting import flops_per_token, num_active_parameters
  from plan.held import abstract_mesh
  from sharding.arrays import check_batch_size

  if not topology:
    raise ValueError("--topology is missing: 'v5e:4x4', 'h100:8', ...")
  machine, table = parse(topology), read_prices(prices or PRICES)
  data, step = config.data, config.step
  mesh = abstract_mesh(config.mesh, machine.num_devices)
  rows = data.global_batch_size
  check_batch_size(rows, mesh, config.rules, accumulation=step.accumulation)
  tokens = config.num_steps * rows * data.seq_len
  a_token = flops_per_token(config.model, data.seq_len)
  found = cost(
    tokens * a_token, machine, mfu=_number("mfu", mfu, 0.4), prices=table
  )
  active = num_active_parameters(config.model)
  print(
    f"{active:.3g} active parameters, {tokens:.3g} tokens"
    f" ({tokens / active:.0f} a parameter): {found.flops:.3g} FLOPs"
    f" (6 N D: {6 * active * tokens:.3g})\n"
  )
  print(_table({"pretraining": found}))
  price = table["chips"][machine.chip.name]
  print(f"{price['usd_per_hour']} USD a chip and hour: {price['source']}")
  for name, what in (("money", "by money"), ("compute", "by compute")):
    print(f"\nthe whole life, {what}")
    print(_table(split(found, table[name])))
  replicas = math.prod(mesh.shape[axis] for axis in config.rules.batch)
  micro = rows // replicas // step.accumulation
  effective = effective_batch(micro, step.accumulation, replicas)
  print(
    f"\nbatch: {micro} rows x {step.accumulation} micro-batches x {replicas}"
    f" replicas = {effective} rows, {rows * data.seq_len:,} tokens; learning"
    f" rate {config.schedule.peak:g}"
  )
  if batch is not None:
    new = _number("batch", batch, rows)
    rates = scaled_rates(config.schedule.peak, rows, new)
    text = ", ".join(f"{rate:.3g} by the {n} rule" for n, rate in rates.items())
    print(f"for {new:g} rows: {text}")
  return found


def _number(name: str, text: str | None, default: float) -> float:
  try:
    value = default if text is None else float(text)
  except ValueError as error:
    raise ValueError(f"--{name} must be a number, got {text!r}") from error
  if not 0 < value < math.inf:
    raise ValueError(f"--{name} must be positive, got {text!r}")
  return value


def _table(rows: Mapping[str, Cost]) -> str:
  """One line a stage."""
  lines = [
    f"{'':<14}{'FLOPs':>10}{'chip-hours':>14}{'days':>9}{'USD':>14}{'MWh':>9}"
  ]
  for name, c in rows.items():
    lines.append(
      f"{name:<14}{c.flops:>10.3g}{c.chip_hours:>14,.0f}{c.days:>9.1f}"
      f"{c.usd:>14,.0f}{c.kwh / 1000:>9.1f}"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  cli.launch(
    run,
    PretrainConfig,
    options={
      "topology": "the machine: v5e:4x4, v5p:2x(4x4x4), h100:16x8, ...",
      "mfu": "model FLOPs utilisation; 0.4 if not given",
      "prices": "a file like plan/prices.json",
      "batch": "rows a step for which the learning rate is wanted, too",
    },
  )
