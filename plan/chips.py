"""What the public knows of accelerators: one table, each row with its source.

Imports no JAX.
"""

import dataclasses
import math
import re

from pallas_kernels.report_chips import CHIPS as _TPUS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """Figures of one `jax.Device`, a whole chip.

  Attributes:
    name: as in a topology.
    platform: as JAX calls it.
    flops: FLOP/s by the dtype of the operands, without sparsity.
    hbm_bytes: of memory, that a program may use.
    hbm_bytes_per_second: to and from it.
    num_links: of the fast network, each to a neighbour (TPU), or 1 to a switch
      (GPU).
    link_bytes_per_second: of one such link, one way.
    slow_bytes_per_second: to chips of other slices (TPU: the data centre's
      network) or nodes (GPU: InfiniBand), one way.
    torus_dims: of the fast network; 0: a switch joins `node` chips.
    node: chips that the fast network joins at most.
    watts: at full load; None: not published.
    sources: where the figures are from.
  """

  name: str
  platform: str
  flops: dict[str, float]
  hbm_bytes: float
  hbm_bytes_per_second: float
  num_links: int
  link_bytes_per_second: float
  slow_bytes_per_second: float
  torus_dims: int
  node: int
  watts: float | None
  sources: tuple[str, ...]

  @property
  def fast_bytes_per_second(self) -> float:
    """Over all links of the fast network, one way."""
    return self.num_links * self.link_bytes_per_second


def _tpu(name: str, *, int8: float, **figures) -> Chip:
  """A row whose peak and bandwidth kernels are judged by as well."""
  figures["sources"] = (
    f"https://cloud.google.com/tpu/docs/{name}",
    *figures.pop("sources"),
  )
  flops = {"bfloat16": _TPUS[name].peak_flops, "int8": int8}
  # jax.lax.Precision.HIGHEST: six passes of bfloat16 through the matrix unit.
  flops["float32"] = flops["bfloat16"] / 6
  return Chip(
    name=name,
    platform="tpu",
    flops=flops,
    hbm_bytes_per_second=_TPUS[name].hbm_bytes_per_second,
    **figures,
  )


# Google gives the bandwidth between chips in both directions and over all
# links ("bidirectional": v5e 400, v5p 1200, v6e 800 GB/s); a link has half of
# it over their number. HBM: what the compiler has of it, which it says where a
# program does not fit ("Used 17.14G of 15.75G hbm").
_TPU_CHIPS = (
  _tpu(
    "v4",
    int8=275e12,
    hbm_bytes=30.75 * 2**30,
    num_links=6,
    link_bytes_per_second=50e9,
    slow_bytes_per_second=6.25e9,
    torus_dims=3,
    node=4096,
    watts=192.0,
    sources=(
      "arXiv:2304.01433, table 4: 6 links of 50 GB/s, at most 192 W",
      "the data centre's network is not published: taken to be v5p's",
    ),
  ),
  _tpu(
    "v5e",
    int8=393e12,
    hbm_bytes=15.75 * 2**30,
    num_links=4,
    link_bytes_per_second=50e9,
    slow_bytes_per_second=6.4e12 / 8 / 256,
    torus_dims=2,
    node=256,
    watts=None,
    sources=("the same page: 6.4 Tbps of data centre network for 256 chips",),
  ),
  _tpu(
    "v5p",
    int8=918e12,
    hbm_bytes=95.74 * 2**30,
    num_links=6,
    link_bytes_per_second=100e9,
    slow_bytes_per_second=50e9 / 8,
    torus_dims=3,
    node=8960,
    watts=None,
    sources=(
      "the same page: 50 Gbps of data centre network a chip",
      "https://cloud.google.com/blog/products/ai-machine-learning/"
      "introducing-cloud-tpu-v5p-and-ai-hypercomputer: int8",
    ),
  ),
  _tpu(
    "v6e",
    int8=1836e12,
    hbm_bytes=31.25 * 2**30,
    num_links=4,
    link_bytes_per_second=100e9,
    slow_bytes_per_second=25.6e12 / 8 / 256,
    torus_dims=2,
    node=256,
    watts=None,
    sources=("the same page: 25.6 Tbps of data centre network for 256 chips",),
  ),
)


def _gpu(name: str, *, bfloat16: float, int8: float, **figures) -> Chip:
  # Dense: half of what NVIDIA writes for sparse matrices. Float32 operands are
  # rounded to TF32, at half the rate of bfloat16.
  flops = {"bfloat16": bfloat16, "int8": int8, "float32": bfloat16 / 2}
  return Chip(
    name=name,
    platform="gpu",
    flops=flops,
    num_links=1,
    torus_dims=0,
    node=8,
    **figures,
  )


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_GPU_CHIPS = (
  _gpu(
    "a100",
    bfloat16=312e12,
    int8=624e12,
    hbm_bytes=80 * 2**30,
    hbm_bytes_per_second=2039e9,
    link_bytes_per_second=300e9,
    slow_bytes_per_second=200e9 / 8,
    watts=400.0,
    sources=(
      f"{_NVIDIA}/a100: A100 80GB SXM, NVLink 600 GB/s both ways",
      "DGX A100 data sheet: 8 ports of 200 Gb/s HDR InfiniBand for 8 GPUs",
    ),
  ),
  _gpu(
    "h100",
    bfloat16=989e12,
    int8=1979e12,
    hbm_bytes=80 * 2**30,
    hbm_bytes_per_second=3350e9,
    link_bytes_per_second=450e9,
    slow_bytes_per_second=400e9 / 8,
    watts=700.0,
    sources=(
      f"{_NVIDIA}/h100: H100 SXM, NVLink 900 GB/s both ways",
      "DGX H100 data sheet: 8 ports of 400 Gb/s NDR InfiniBand for 8 GPUs",
    ),
  ),
  _gpu(
    "h200",
    bfloat16=989e12,
    int8=1979e12,
    hbm_bytes=141e9,
    hbm_bytes_per_second=4800e9,
    link_bytes_per_second=450e9,
    slow_bytes_per_second=400e9 / 8,
    watts=700.0,
    sources=(
      f"{_NVIDIA}/h200: H200 SXM, NVLink 900 GB/s both ways",
      "DGX H200 data sheet: 8 ports of 400 Gb/s NDR InfiniBand for 8 GPUs",
    ),
  ),
)

CHIPS = {chip.name: chip for chip in (*_TPU_CHIPS, *_GPU_CHIPS)}


@dataclasses.dataclass(frozen=True)
class Topology:
  """Chips in a grid: "v5p:4x4x4", "h100:16x8" (nodes x GPUs), "v5e:2x(4x4)".

  Attributes:
    chip: of one kind.
    shape: of a slice or node, in the order of its network's dims.
    num_slices: slices or nodes, which the slow network joins.
  """

  chip: Chip
  shape: tuple[int, ...]
  num_slices: int = 1

  @property
  def slice_size(self) -> int:
    """Chips that the fast network joins."""
    return math.prod(self.shape)

  @property
  def num_devices(self) -> int:
    """All chips."""
    return self.num_slices * self.slice_size


def parse(text: str) -> Topology:
  """Reads a topology.

  Args:
    text: "v5e:4x4", "v5p:4x4x4", "v5p:2x(4x4x4)" for two slices, "h100:8",
      "h100:16x8" for 16 nodes.

  Raises:
    ValueError: no such chip, or no such grid of it.
  """
  name, _, grid = text.partition(":")
  if name not in CHIPS:
    raise ValueError(
      f"--topology={text!r}: there are figures of {', '.join(CHIPS)}; wanted"
      " CHIP:GRID, as in 'v5e:4x4' or 'h100:16x8'"
    )
  chip = CHIPS[name]
  found = re.fullmatch(r"(?:(\d+)x\((\d+(?:x\d+)*)\)|(\d+(?:x\d+)*))", grid)
  sizes = [int(n) for n in (found[2] or found[3]).split("x")] if found else []
  slices = int(found[1] or 1) if found else 1
  if chip.torus_dims == 0 and len(sizes) == 2:
    slices, sizes = slices * sizes[0], sizes[1:]
  dims = chip.torus_dims or 1
  if len(sizes) != dims or min(sizes) < 1 or math.prod(sizes) > chip.node:
    wanted = "x".join("ABC"[:dims])
    more = (
      f"{name}:NODESx{chip.node}" if not chip.torus_dims else f"2x({wanted})"
    )
    raise ValueError(
      f"--topology={text!r}: wanted {name}:{wanted} of at most {chip.node}"
      f" chips, or {more} for several of them"
    )
  return Topology(chip, tuple(sizes), slices)
