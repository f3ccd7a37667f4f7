"""Block sizes of the TPU kernels.

Found with `python -m pallas_kernels.report --op=linear_cross_entropy`: bundles
of a whole step, for heads in float32 and x in bf16, among those whose HBM time
is below their schedule. The backward kernel moves 12 bytes a weight and step,
the head and its gradient in and out: it needs about 750 tokens a step on v5e,
500 on v5p and 1,700 on v6e to be bound by its matmuls.
"""

from typing import NamedTuple

import jax

LANES = 128


class Blocks(NamedTuple):
  """How the kernels cut their work; all multiples of 128.

  Attributes:
    tokens: at most so many, whose logits exist at one time.
    rows: tokens of an inner step of the forward kernel.
    forward_vocab: tokens of the vocabulary a grid step, forward.
    backward_vocab: the same, backward.
    dims: features of an inner step of the backward kernel.
  """

  tokens: int
  rows: int
  forward_vocab: int
  backward_vocab: int
  dims: int


# (chip, D) -> blocks.
TABLE = {
  ("v5e", 4096): Blocks(1024, 512, 512, 256, 1024),
  ("v5p", 4096): Blocks(1024, 512, 512, 128, 1024),
  ("v6e", 4096): Blocks(2048, 512, 512, 256, 1024),
}
# What the two kernels may fill of a core's fast memory, MiB.
_VMEM = {"v4": 14, "v5e": 100, "v5p": 52, "v6e": 100}
_KINDS = {
  "TPU v4": "v4",
  "TPU v5 lite": "v5e",
  "TPU v5e": "v5e",
  "TPU v5": "v5p",
  "TPU v5p": "v5p",
  "TPU v6 lite": "v6e",
  "TPU v6e": "v6e",
}


def this_chip() -> str:
  """That of the devices here; "v5e" where there is no TPU of the table."""
  return _KINDS.get(jax.devices()[0].device_kind, "v5e")


def find(D: int, num_bytes: tuple[int, int], chip: str | None = None) -> Blocks:
  """The table's entry with the nearest D, cut until it fits.

  Args:
    D: features of x.
    num_bytes: of a matmul operand, and of a weight of the head.
    chip: "v5e", ...; None: that of the devices here.
  """
  chip = chip or this_chip()
  entries = {size: row for (name, size), row in TABLE.items() if name == chip}
  if not entries:
    entries = {size: row for (_, size), row in TABLE.items()}
  blocks = entries[min(entries, key=lambda size: abs(size - D))]
  while vmem_bytes(blocks, D, num_bytes) > _VMEM[chip] << 20:
    smaller = _smaller(blocks)
    if smaller == blocks:
      break  # The compiler will say what it has.
    blocks = smaller
  return blocks


def vmem_bytes(blocks: Blocks, D: int, num_bytes: tuple[int, int]) -> int:
  """What the larger of the two kernels keeps in fast memory."""
  operand, weight = num_bytes
  C, F, V = blocks.tokens, blocks.forward_vocab, blocks.backward_vocab
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
