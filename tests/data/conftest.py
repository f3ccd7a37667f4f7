"""Files that several tests of data/ share."""

import os
import sysconfig
from pathlib import Path

import pytest

from data import tokenizer


@pytest.fixture(scope="session")
def source_texts() -> list[str]:
  """About 1 MB of real source code: every machine has the standard library."""
  folder = Path(sysconfig.get_path("stdlib"))
  return [p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.py"))][
    :60
  ]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, source_texts):
  """A small SentencePiece tokenizer with chat tokens."""
  path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
  return tokenizer.train_sentencepiece(source_texts, path, vocab_size=1000)


@pytest.fixture(scope="session")
def shared_data() -> Path:
  """The folder of large real files, where there is one."""
  if "ONEMESH_DATA" not in os.environ:
    pytest.skip("ONEMESH_DATA is not set: no real tokenizers to test against")
  return Path(os.environ["ONEMESH_DATA"])
