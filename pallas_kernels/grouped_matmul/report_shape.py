"""The matmuls that the report speaks of, ours and those of peers."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.report_case import Case, Part

# The widening matmul of a mixture of 8 experts, two for each of 8192 tokens.
# Direction 0 is forward, 1 the gradient of x, 2 that of w.
SHAPE = dict(
  rows=16384, groups=8, features=4096, hidden=14336, bits=16, direction=0
)
DIRECTIONS = ("forward", "backward x", "backward w")


def group_sizes(shape: Mapping[str, int]) -> np.ndarray:
  """int32 [E]: a router's choice, ragged, the same in every run."""
  rng = np.random.default_rng(0)
  share = rng.dirichlet(np.full(shape["groups"], 8.0))
  return rng.multinomial(shape["rows"], share).astype(np.int32)


def make_case(
  shape: Mapping[str, int],
  blocks: Mapping[str, int],
  function: Callable,
  kernel: str,
  scalars: list,
) -> Case:
  """One direction.

  Args:
    shape: as `SHAPE`.
    blocks: block sizes, to be shown.
    function: of (x, w, sizes) forward, (dout, w, sizes) for the gradient of x,
      (x, dout, sizes) for that of w.
    kernel: name of the kernel in it.
    scalars: its prefetched scalars; see `report_case.Part`.
  """
  M, E = shape["rows"], shape["groups"]
  D, F = shape["features"], shape["hidden"]
  dtype = {16: jnp.bfloat16, 32: jnp.float32}[shape["bits"]]
  x, w, dout = (
    jax.ShapeDtypeStruct(dims, dtype) for dims in ((M, D), (E, D, F), (M, F))
  )
  args = ((x, w), (dout, w), (x, dout))[shape["direction"]]
  part = Part(
    name=DIRECTIONS[shape["direction"]],
    kernels=(kernel,),
    useful_flops=2.0 * M * D * F,
    scalars={kernel: [np.asarray(array, np.int32) for array in scalars]},
  )
  return Case(
    blocks=dict(blocks),
    function=function,
    args=(*args, jax.ShapeDtypeStruct((E,), jnp.int32)),
    parts=(part,),
  )
