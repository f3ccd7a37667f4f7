"""Settings that contradict themselves are refused, with what to change."""

import subprocess
import sys

import pytest

from serve.config import Sampling


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
    (dict(num_samples=0), "num_samples must be at least 1"),
    (dict(temperature=-1.0), "temperature must not be negative, got -1"),
    (dict(top_k=-3), "top_k must not be negative"),
    (dict(top_p=1.5), r"top_p must be in \[0, 1\], got 1.5"),
    (dict(min_p=-0.1), r"min_p must be in \[0, 1\]"),
    (dict(stop_strings=("a", "")), "must not hold an empty text"),
    (dict(num_beams=2), "set sampling.temperature=0, got 1.0"),
    (dict(num_beams=2, temperature=0.0, top_k=4), "top_k .got 4."),
    (
      dict(num_beams=2, temperature=0.0, num_samples=3),
      "3 of 2 beams: raise sampling.num_beams",
    ),
    (
      dict(num_beams=2, temperature=0.0, stop_strings=("x",)),
      "use sampling.stop_ids",
    ),
  ],
)
def test_bad_settings(settings, message):
  with pytest.raises(ValueError, match=message):
    Sampling(**settings)


def test_edges_are_valid():
  Sampling(temperature=0.0, top_k=0, top_p=0.0, min_p=1.0)
  Sampling(temperature=0.0, num_beams=4, num_samples=4)


def test_imports_no_jax():
  code = "import sys, serve.config; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code]).returncode == 0
