"""Reads what a traced program does, without compiling or running it."""

import math
from collections.abc import Iterator

from jax.extend.core import jaxprs_in_params


def equations(jaxpr, times: int = 1) -> Iterator[tuple]:
  """All equations, those inside others too, and how often each one runs.

  Args:
    jaxpr: a (closed) jaxpr, of `jax.make_jaxpr`.
    times: how often it runs itself.

  Yields:
    (equation, times).
  """
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    yield equation, times
    repeats = equation.params.get("length", 1)
    for inner in jaxprs_in_params(equation.params):
      yield from equations(inner, times * repeats)


def matmul_flops(jaxpr) -> int:
  """FLOPs of all matmuls, 2 a multiply-add."""
  total = 0
  for equation, times in equations(jaxpr):
    if equation.primitive.name == "dot_general":
      contracted = equation.params["dimension_numbers"][0][0]
      x, y = equation.invars[0].aval, equation.outvars[0].aval
      depth = math.prod(x.shape[dim] for dim in contracted)
      total += times * 2 * y.size * depth
  return total


def shapes(jaxpr, dtype: str | None = None) -> set[tuple[int, ...]]:
  """Shapes of all values that are computed, of one dtype or all."""
  return {
    value.aval.shape
    for equation, _ in equations(jaxpr)
    for value in equation.outvars
    if dtype is None or value.aval.dtype == dtype
  }
