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
from functools import partial

from benchmarks import turns
from benchmarks.shapes import SHAPES


def contest(shape: str, dtype: str, options: argparse.Namespace) -> dict:
  """Runs one case, a race against each peer: five together fill the memory."""
  case = ("--shape", shape, "--dtype", dtype)
  cpu = {"JAX_PLATFORMS": "cpu"} | turns.HUGE_PAGES
  start = lambda name, *args, **kw: turns.Contestant(
    f"benchmarks.contestants.{name}", *case, *args, env=cpu, **kw
  )
  peers = {"plain_jax": partial(start, "plain_jax")}
  if importlib.util.find_spec("transformers"):
    for mode in ("eager", "compiled"):
      peers[f"torch_{mode}"] = partial(start, "torch_llama", "--mode", mode)
  if options.levanter_python:
    python = options.levanter_python
    peers["levanter"] = partial(start, "levanter_llama", python=python)

  _, batch, length = SHAPES[shape]
  rate = lambda seconds: round(batch * length / statistics.median(seconds), 1)
  result = {"shape": shape, "dtype": dtype}
  times, facts = [], {}  # Ours, of all races.
  for name, start_peer in peers.items():
    ours, peer = start("onemesh"), start_peer()
    seconds = turns.race(
      {"onemesh": ours, name: peer}, rounds=options.rounds, steps=options.steps
    )
    times += seconds["onemesh"]
    facts = ours.facts
    result[name] = {
      "tokens_per_second": rate(seconds[name]),
      "ratio": round(turns.ratio(seconds["onemesh"], seconds[name]), 3),
      **peer.facts,
    }
  result["onemesh"] = {"tokens_per_second": rate(times), **facts}
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
