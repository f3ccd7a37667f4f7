"""A corpus that every machine has: the source of Python's standard library.

  python -m data.prepare --config=configs/prepare_stdlib.py \
    --workdir=runs/stdlib
"""

import sysconfig

from data.config import PrepareConfig, Source


def get_config() -> PrepareConfig:
  """Whole files; one in eight is set aside. A tokenizer of 4096 pieces."""
  stdlib = sysconfig.get_path("stdlib")
  return PrepareConfig(
    sources=(
      Source(path=f"{stdlib}/*.py", format="text"),
      Source(path=f"{stdlib}/[a-r]*/*.py", format="text"),
    ),
    on_bad_utf8="skip",
    heldout_fraction=0.125,
    vocab_size=4096,
  )
