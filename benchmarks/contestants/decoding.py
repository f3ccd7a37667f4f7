"""The case that a contestant of the decoding benchmark is told to run."""

import argparse
import time

from benchmarks.shapes import llama
from model.families.llama import smollm2_135m

# Tokens of each prompt, and new ones: the first comes with the prompt, the
# others are timed.
PROMPT, NEW = 128, 128

SHAPES = {
  "small": llama(32000, 8, 512, 8, 4, 1376, 2048),
  "smollm2": smollm2_135m(),
}


def parse():
  """(model config, options) of the command line."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--shape", choices=SHAPES, required=True)
  parser.add_argument("--dtype", choices=("float32", "bf16"), required=True)
  parser.add_argument("--batch", type=int, required=True)
  options = parser.parse_args()
  return SHAPES[options.shape], options


def stopwatch(generate):
  """A step that counts the time of NEW - 1 tokens.

  Args:
    generate: makes the given number of new tokens for each prompt.
  """

  def seconds(count):
    start = time.perf_counter()
    generate(count)
    return time.perf_counter() - start

  def step():
    prefill = seconds(1)
    return seconds(NEW) - prefill

  return step
