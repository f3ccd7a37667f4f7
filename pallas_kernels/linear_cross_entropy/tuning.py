"""Block sizes of the TPU kernels.

Found with `python -m pallas_kernels.report --op=linear_cross_entropy` (on v6e
with --shape=tokens=2048) by its --search and by hand: bundles of whole kernels,
D 4096, V 128256, the head in float32. Larger blocks read vector registers back
more often and are faster all the same: on v5e, 256 rows in place of 512 spill a
quarter as much in the forward kernel and take 7 % more bundles.

The backward kernel moves 12 bytes a weight and step, the head in, its gradient
in and out: to be bound by its matmuls it needs about 750 tokens a step on v5e,
500 on v5p and 1,700 on v6e.
"""

from typing import NamedTuple

from pallas_kernels.chips import VMEM, this_chip

LANES = 128


class Blocks(NamedTuple):
  """How the kernels cut their work; all sizes are multiples of 128.

  Attributes:
    tokens: at most so many, whose logits exist at one time.
    rows: tokens of an inner step of the forward kernel.
    forward_vocab: tokens of the vocabulary a grid step, forward.
    backward_vocab: the same, backward.
    dims: features of an inner step of the backward kernel.
    cores: that share a program and its HBM, each with a VMEM of its own.
  """

  tokens: int
  rows: int
  forward_vocab: int
  backward_vocab: int
  dims: int
  cores: int = 1


# (chip, bits of a matmul operand) -> blocks.
TABLE = {
  ("v5e", 16): Blocks(1024, 512, 1024, 512, 1024),
  ("v5e", 32): Blocks(1024, 256, 256, 128, 256),
  ("v5p", 16): Blocks(1024, 512, 512, 128, 1024, 2),
  ("v5p", 32): Blocks(512, 256, 256, 128, 256, 2),
  ("v6e", 16): Blocks(2048, 512, 1024, 256, 2048),
  ("v6e", 32): Blocks(1024, 256, 256, 128, 256),
}


def find(D: int, num_bytes: tuple[int, int], chip: str | None = None) -> Blocks:
  """The table's nearest entry, cut until it fits fast memory.

  Args:
    D: features of x.
    num_bytes: of a matmul operand, and of a weight of the head.
    chip: "v5e", ...; None: that of the program being traced.
  """
  chip = chip or this_chip()
  near = lambda key: (key[0] != chip, abs(key[1] - 8 * num_bytes[0]))
  blocks = TABLE[min(TABLE, key=near)]
  while vmem_bytes(blocks, D, num_bytes) > VMEM[chip] << 20:
    smaller = _smaller(blocks)
    if smaller == blocks:
      break  # The compiler will say what it has.
    blocks = smaller
  return blocks


def vmem_bytes(blocks: Blocks, D: int, num_bytes: tuple[int, int]) -> int:
  """What the larger of the two kernels keeps in fast memory."""
  operand, weight = num_bytes
  C, _, F, V, *_ = blocks
  forward = C * D * operand + F * D * 2 * weight + C * F * 8
  # dx is summed in float32, the gradient of the head comes and goes in it.
  backward = C * D * (operand + 4) + V * D * (2 * weight + 16)
  backward += C * V * (8 + 2 * operand)
  per_token = 8 * C * LANES * 4
  return max(forward, backward) + per_token


def _smaller(blocks: Blocks) -> Blocks:
  """The vocabulary first: more tokens a step are fewer bytes in all."""
  for name in ("backward_vocab", "forward_vocab", "tokens"):
    size = getattr(blocks, name)
    if size > LANES:
      blocks = blocks._replace(**{name: size // 2})
      return blocks._replace(rows=min(blocks.rows, blocks.tokens))
  return blocks
