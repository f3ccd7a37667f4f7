"""What an op tells the report about itself.

An op, or a peer that it is compared with, has a module with

  SHAPE: dict[str, int], the settings of a shape and their usual values;
  make_case(chip, shape, blocks) -> Case, where `chip` is "v5e", "v6e", ...,
    and `blocks` a dict of block sizes, or None: those of the tuning table;
  candidates(chip, shape) -> list[dict[str, int]], the block sizes to search;
  table_entry(chip, shape, best) -> str, a line of the op's tuning table, of
    the best block sizes of each part. A peer needs none.

The op's own is `pallas_kernels/<op>/report.py`, a peer's
`pallas_kernels/<op>/<peer>.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """One direction of an op: the kernels that compute it.

  Attributes:
    name: "forward" or "backward".
    kernels: `name=` of each `pallas_call`.
    useful_flops: without masked scores, recomputation or padding.
    blocks: names of the block sizes that it depends on; none: all.
    scalars: kernel -> the arrays of its `num_scalar_prefetch`, in order,
      int8, int16 or int32, as far as their values are known.
  """

  name: str
  kernels: tuple[str, ...]
  useful_flops: float
  blocks: tuple[str, ...] = ()
  scalars: Mapping[str, list[np.ndarray]] = dataclasses.field(
    default_factory=dict
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One function to compile and to read.

  Attributes:
    blocks: the block sizes in it.
    function: of `args`; it calls the kernels of all parts.
    args: `jax.ShapeDtypeStruct`s.
    parts: what to report, each by itself.
  """

  blocks: dict[str, int]
  function: Callable
  args: tuple
  parts: tuple[Part, ...]
