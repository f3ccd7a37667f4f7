"""Cost: closed forms, the shares of the articles, tables that are wrong."""

import json
import math

import pytest

from plan import cost
from plan.chips import parse
from tests.plan.test_memory import run_config
from tests.train import tiny

PRICES = cost.read_prices()


def test_a_closed_form():
  """One chip at half of its peak for a day."""
  machine = parse("h100:8")
  found = cost.cost(8 * 989e12 * 0.5 * 86_400, machine, mfu=0.5, prices=PRICES)
  assert found.days == pytest.approx(1)
  assert found.chip_hours == pytest.approx(8 * 24)
  assert found.usd == pytest.approx(8 * 24 * 2.99)
  assert found.kwh == pytest.approx(8 * 24 * 0.7 * 1.5)


def test_the_shares_of_the_articles():
  """60-70 / 20-30 / 10 of the budget; 85 / 10 / 5 of the compute."""
  found = cost.cost(1e21, parse("v5e:4x4"), mfu=0.4, prices=PRICES)
  money = cost.split(found, PRICES["money"])
  whole = sum(stage.usd for stage in money.values())
  assert money["pretraining"] == found
  assert 0.6 <= money["pretraining"].usd / whole <= 0.7
  assert 0.2 <= money["fine-tuning"].usd / whole <= 0.3
  assert money["experiments"].usd / whole == pytest.approx(0.1)
  compute = cost.split(found, PRICES["compute"])
  ratio = lambda stage: compute[stage].flops / found.flops
  assert ratio("SFT") == pytest.approx(10 / 85)
  assert ratio("alignment") == pytest.approx(5 / 85)


def test_the_batch_of_the_article():
  """2 rows, 8 micro-batches, 64 GPUs: 1024 rows."""
  assert cost.effective_batch(2, 8, 64) == 1024


def test_learning_rates_of_another_batch():
  rates = cost.scaled_rates(1e-3, 256, 1024)
  assert rates == pytest.approx({"linear": 4e-3, "square root": 2e-3})


def test_a_run(capsys):
  config = run_config(tiny.GQA, rows=32, seq_len=64, fsdp=4, accumulation=2)
  found = cost.run(config, topology="v5e:2x2", mfu="0.5", batch="64")
  from model.accounting import flops_per_token

  tokens = 32 * 64
  assert found.flops == tokens * flops_per_token(tiny.GQA, 64)
  text = capsys.readouterr().out
  assert "4 rows x 2 micro-batches x 4 replicas = 32 rows" in text
  assert "0.0004 by the linear rule" in text
  assert "the whole life, by compute" in text


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (dict(), "--topology is missing"),
    (dict(topology="v5e:2x2", mfu="1.2"), "--mfu must be above 0"),
    (dict(topology="v5e:2x2", mfu="fast"), "--mfu must be a number"),
    (dict(topology="v5e:2x2", prices="none.json"), "there is no file"),
    (dict(topology="v5e:4x4"), "config.mesh uses 4 of the 16"),
  ],
)
def test_bad_flags(flags, words):
  config = run_config(tiny.GQA, rows=32, seq_len=64, fsdp=4)
  with pytest.raises(ValueError, match=words):
    cost.run(config, **flags)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    (dict(chips={}), "has no 'v5e'"),
    (dict(money={"pretraining": 0.5}), "must add up to 1"),
    (dict(server_factor=-1), "negative"),
    (dict(chips={"v5e": {"watts": 1}}), "usd_per_hour"),
  ],
)
def test_a_table_that_is_wrong_is_named(tmp_path, change, words):
  path = tmp_path / "prices.json"
  path.write_text(json.dumps(PRICES | change))
  config = run_config(tiny.GQA, rows=32, seq_len=64, fsdp=4)
  with pytest.raises(ValueError, match=words):
    cost.run(config, topology="v5e:2x2", prices=str(path))


def test_own_prices_count(tmp_path):
  path = tmp_path / "prices.json"
  row = PRICES["chips"]["v5e"] | {"usd_per_hour": 12.0}
  path.write_text(json.dumps(PRICES | {"chips": {"v5e": row}}))
  config = run_config(tiny.GQA, rows=32, seq_len=64, fsdp=4)
  ours = cost.run(config, topology="v5e:2x2", prices=str(path))
  theirs = cost.run(config, topology="v5e:2x2")
  assert math.isclose(ours.usd, 10 * theirs.usd)
