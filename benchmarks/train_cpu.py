"""Tokens per second of one training step on this CPU, ours beside others'.

  python -m benchmarks.train_cpu [--shape tiny small] [--dtype float32 bf16]

Peers: a plain JAX step (`plain_jax.py`), transformers on torch, eager and
compiled, and Levanter where `--levanter-python` names an interpreter that has
it. Prints one JSON object a case: median tokens/s and peak memory of each, and
the median over rounds of the ratios (above 1: we are faster).

Shapes are in `shapes.py`. All take AdamW steps with float32 master weights on
random tokens; "bf16" is each system's own mixed precision.
"""

import argparse
import importlib.util
import json
import statistics

from benchmarks import turns
from benchmarks.shapes import SHAPES


def contest(shape: str, dtype: str, options: argparse.Namespace) -> dict:
  """Runs one case."""
  case = ("--shape", shape, "--dtype", dtype)
  cpu = {"JAX_PLATFORMS": "cpu"} | turns.HUGE_PAGES
  start = lambda name, *args, **kw: turns.Contestant(
    f"benchmarks.contestants.{name}", *case, *args, env=cpu, **kw
  )
  contestants = {"onemesh": start("onemesh"), "plain_jax": start("plain_jax")}
  if importlib.util.find_spec("transformers"):
    contestants["torch_eager"] = start("torch_llama", "--mode", "eager")
    contestants["torch_compiled"] = start("torch_llama", "--mode", "compiled")
  if options.levanter_python:
    python = options.levanter_python
    contestants["levanter"] = start("levanter_llama", python=python)
  seconds = turns.race(contestants, rounds=options.rounds, steps=options.steps)
  _, batch, length = SHAPES[shape]
  result = {"shape": shape, "dtype": dtype}
  for name, contestant in contestants.items():
    result[name] = {
      "tokens_per_second": round(
        batch * length / statistics.median(seconds[name]), 1
      ),
      "ratio": round(turns.ratio(seconds["onemesh"], seconds[name]), 3),
      **contestant.facts,
    }
  return result


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--shape", nargs="+", default=list(SHAPES))
  parser.add_argument("--dtype", nargs="+", default=["float32", "bf16"])
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--steps", type=int, default=3, help="a round")
  parser.add_argument("--levanter-python", help="of a venv with marin-levanter")
  options = parser.parse_args()
  for shape in options.shape:
    for dtype in options.dtype:
      print(json.dumps(contest(shape, dtype, options)), flush=True)


if __name__ == "__main__":
  main()
