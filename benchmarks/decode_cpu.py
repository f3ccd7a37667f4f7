"""Tokens per second of greedy decoding on this CPU, ours beside transformers.

  python -m benchmarks.decode_cpu [--shape small smollm2] [--batch 1 8]
    [--dtype float32 bf16] [--peer-python=/path/to/python]

Random weights, prompts of 128 tokens, 128 new ones; the time of the prompt is
taken off. Prints one JSON object a case: median tokens/s of each, the median
over rounds of the ratio (above 1: we are faster), and the share of the memory
bandwidth that reading each weight once a step reaches. The bandwidth is that
of copies by all cores, read and written bytes both counted.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import statistics
import time

import numpy as np

from benchmarks import turns
from benchmarks.contestants.decoding import NEW, SHAPES
from model import accounting

_COPY_BYTES = 64 * 2**20  # of each core: far beyond its caches


class _Copies:
  """A contestant that copies memory, to know what the machine gives."""

  def __init__(self):
    """Makes the arrays, touched so that they exist."""
    self.facts = {}
    self._cores = os.cpu_count()
    make = lambda: np.ones(_COPY_BYTES, np.uint8)
    self._pairs = [(make(), make()) for _ in range(self._cores)]
    self._threads = concurrent.futures.ThreadPoolExecutor(self._cores)

  def run(self, count: int) -> list[float]:
    """Seconds of each of `count` times 10 copies by every core."""
    seconds = []
    for _ in range(count):
      start = time.perf_counter()
      list(self._threads.map(lambda pair: np.copyto(*pair), self._pairs * 10))
      seconds.append(time.perf_counter() - start)
    return seconds

  def quit(self) -> None:
    """Nothing runs on."""
    self._threads.shutdown()

  @property
  def bytes_moved(self) -> int:
    """By one step."""
    return 2 * 10 * self._cores * _COPY_BYTES


def contest(shape: str, dtype: str, batch: int, options) -> dict:
  """Runs one case."""
  case = ("--shape", shape, "--dtype", dtype, "--batch", str(batch))
  start = lambda name, **kw: turns.Contestant(
    f"benchmarks.contestants.{name}",
    *case,
    env={"JAX_PLATFORMS": "cpu"} | turns.HUGE_PAGES,
    **kw,
  )
  copies = _Copies()
  contestants = {"onemesh": start("onemesh_decode"), "copy": copies}
  if options.peer_python:
    peer = start("torch_decode", python=options.peer_python)
    contestants["transformers"] = peer
  elif importlib.util.find_spec("transformers"):
    contestants["transformers"] = start("torch_decode")
  seconds = turns.race(contestants, rounds=options.rounds, steps=1)

  config = SHAPES[shape]
  # The table of embeddings is looked up, not multiplied, unless it is tied.
  lookups = 0 if config.tied else config.vocab_size * config.embed_dim
  weights = accounting.num_parameters(config) - lookups
  steps = NEW - 1
  share = lambda ours, copy, size: (
    size * weights * steps / ours / (copies.bytes_moved / copy)
  )
  result = {"shape": shape, "dtype": dtype, "batch": batch}
  copy = statistics.median(seconds["copy"])
  result["copy_gb_per_second"] = round(copies.bytes_moved / copy / 1e9, 1)
  for name in seconds.keys() - {"copy"}:
    # Ours holds a bf16 model in float32; see contestants/onemesh_decode.py.
    size = 2 if dtype == "bf16" and name == "transformers" else 4
    pairs = zip(seconds[name], seconds["copy"], strict=True)
    result[name] = {
      "tokens_per_second": round(
        batch * steps / statistics.median(seconds[name]), 1
      ),
      "ratio": round(turns.ratio(seconds["onemesh"], seconds[name]), 2),
      "share_of_bandwidth": round(
        statistics.median(share(*pair, size) for pair in pairs), 3
      ),
      **contestants[name].facts,
    }
  return result


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--shape", nargs="+", default=list(SHAPES))
  parser.add_argument("--dtype", nargs="+", default=["float32", "bf16"])
  parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--peer-python", help="of a venv with transformers")
  options = parser.parse_args()
  for shape in options.shape:
    for dtype in options.dtype:
      for batch in options.batch:
        case = contest(shape, dtype, batch, options)
        print(json.dumps(case), flush=True)


if __name__ == "__main__":
  main()
