"""Walks the equations of a traced function, however deep."""

import pathlib
from collections.abc import Iterator

from jax._src import source_info_util
from jax.extend.core import jaxprs_in_params

ROOT = str(pathlib.Path(__file__).parents[2])


def equations(jaxpr) -> Iterator:
  """Yields every equation, those of scans, branches and calls included."""
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  for equation in jaxpr.eqns:
    yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from equations(inner)


def place(equation) -> str:
  """The innermost file of this code base that made an equation."""
  frames = source_info_util.user_frames(equation.source_info.traceback)
  for frame in frames:
    if frame.file_name.startswith(ROOT):
      return frame.file_name[len(ROOT) + 1 :]
  return "elsewhere"
