"""The table of claims: its numbers, by hand."""

import pytest

from plan import claims


@pytest.fixture(scope="module")
def computed():
  return {claim.says: claim.computed for claim in claims.claims()}


@pytest.mark.parametrize(
  ("says", "numbers"),
  [
    ("7B, AdamW, float32", ["28 + 28 + 56 = 112 GB"]),
    ("ZeRO-3 on 8 GPUs", ["14.0 GB of state"]),
    # 16 / (8 + 8/64), 16 / (4 + 12/64), 16 / (4 + 12/64), 16 / (2 + 14/64).
    ("ZeRO-1 saves 4x", ["2.0x and 3.8x", "3.8x and", "7.2x"]),
    ("about 1.5 TB", ["1.12 TB"]),
    ("PPO's four models", ["2.25 times", "18 times"]),
    # 6e24 / (8192 x 989e12 x 75 x 86400).
    ("6e24 FLOPs in 2 to 3 months", ["11% MFU", "21 days"]),
    ("6e24 FLOPs for 70B", ["14.3T tokens"]),
    ("1000 GPUs for a month", ["5.9e+21", "3.2e+23", "52B", "1.0T"]),
    ("ring AllReduce", ["1.5 times"]),
    ("TP 8 x PP 8", ["8192 of 8192", "17.5 GB"]),
    ("64 GPUs = 1024 rows", ["1024"]),
  ],
)
def test_the_numbers(computed, says, numbers):
  (found,) = [text for claim, text in computed.items() if says in claim]
  assert all(number in found for number in numbers), found


def test_the_peak_is_above_the_state():
  assert claims.seven_on_eight() > 14e9


def test_what_recomputation_adds():
  """One more forward pass of the layers is a third of the work, less heads."""
  block, nested = claims.recomputed()
  assert 0.2 < block < 1 / 3 < nested < 2 / 3
