"""Writes tests/model/families/recorded/*.npz from transformers.

Run in an environment with the extra `oracle`:

  python -m tests.oracles.record_families
"""

import pathlib

import numpy as np

from tests.oracles import family_cases, transformers_oracle

FOLDER = pathlib.Path(__file__).parents[1] / "model/families/recorded"


def main():
  """Records every case."""
  for name in family_cases.CONFIGS:
    batch = family_cases.inputs(name)
    logits = transformers_oracle.logits(transformers_oracle.build(name), batch)
    np.savez_compressed(FOLDER / f"{name}.npz", **batch, logits=logits)
    print(f"{name}: logits {logits.std():.2f} around {logits.mean():.2f}")


if __name__ == "__main__":
  main()
