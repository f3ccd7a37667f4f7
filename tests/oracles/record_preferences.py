"""Records TRL's preference losses: python -m tests.oracles.record_preferences.

Writes tests/align/trl_losses.json, which the tests without torch read.
"""

import json
import pathlib

from tests.oracles import preference_cases

PATH = pathlib.Path(__file__).parents[1] / "align" / "trl_losses.json"


def compute() -> dict[str, dict]:
  """Case -> TRL's losses and metrics.

  "sigmoid" is DPO, for which TRL ignores label smoothing. Of a single pair
  its "aot" is the conservative DPO: there is nothing to sort.
  """
  import trl

  from tests.oracles import trl_oracle

  smoothing = preference_cases.LABEL_SMOOTHING
  cases = {"trl": trl.__version__}
  for beta in preference_cases.BETAS:
    cases[f"dpo beta={beta}"] = trl_oracle.losses("sigmoid", beta)
    cases[f"cdpo beta={beta}"] = trl_oracle.losses("aot", beta, smoothing)
  return cases


if __name__ == "__main__":
  PATH.write_text(json.dumps(compute(), indent=1) + "\n")
