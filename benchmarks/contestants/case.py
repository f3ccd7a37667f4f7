"""The case that a contestant is told to run."""

import argparse

from benchmarks.shapes import SHAPES


def parse(**choices):
  """(model config, batch, sequence length, options) of the command line."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--shape", choices=SHAPES, required=True)
  parser.add_argument("--dtype", choices=("float32", "bf16"), required=True)
  for name, values in choices.items():
    parser.add_argument(f"--{name}", choices=values, required=True)
  options = parser.parse_args()
  return *SHAPES[options.shape], options
