"""Block sizes of the TPU kernels.

Found with `python -m pallas_kernels.report --op=flash_attention --search`: most
useful FLOPs a bundle of the whole kernel, bf16, causal, T = 4096 (smaller
blocks where they lose less than 1 %). Blocks are cut for shorter lengths; a
chunk of keys, with its gradients, fits fast memory.

All spill: the scores of a tile are 256 to 1024 vector registers of 64, and go
through memory between the products and the softmax whether the compiler calls
it so or not. Tiles small enough to stay in registers feed the matrix units
worse: on v6e 256 x 512 takes 580 bundles where 512 x 512 takes 871.
"""

from typing import NamedTuple

from pallas_kernels.chips import this_chip

LANES = 128
# What a chunk of keys may fill of fast memory, which is 64 MiB on v5p.
_CHUNK_BYTES = 32 * 2**20


class Blocks(NamedTuple):
  """How a kernel cuts its work; see `tpu_plan.Plan`."""

  block_q: int
  block_k: int
  step: int


# (chip, head_dim) -> blocks of the forward and of the backward kernel.
TABLE = {
  ("v5e", 64): (Blocks(1024, 1024, 256), Blocks(1024, 1024, 128)),
  ("v5e", 128): (Blocks(512, 512, 256), Blocks(1024, 1024, 256)),
  ("v5e", 256): (Blocks(512, 512, 256), Blocks(1024, 1024, 128)),
  ("v6e", 64): (Blocks(1024, 1024, 512), Blocks(1024, 1024, 256)),
  ("v6e", 128): (Blocks(1024, 1024, 512), Blocks(1024, 1024, 256)),
  ("v6e", 256): (Blocks(1024, 1024, 512), Blocks(1024, 1024, 256)),
}


def find(
  direction: str,
  T: int,
  S: int,
  H: int,
  operand_bytes: int,
  chip: str | None = None,
) -> dict[str, int]:
  """The nearest entry of the table, for a length.

  Args:
    direction: "forward" or "backward".
    T: number of queries.
    S: number of keys.
    H: features of a head.
    operand_bytes: of a number of queries, keys and values.
    chip: "v5e", ...; None: that of the program being traced.

  Returns:
    `block_q`, `block_k`, `step` and `chunk_k` of a plan.
  """
  chip = chip or this_chip()
  near = lambda key: (key[0] != chip, abs(key[1] - H))
  entry = TABLE[min(TABLE, key=near)]
  blocks = entry[0 if direction == "forward" else 1]
  # Equal blocks make stairs of the diagonal; else each is cut by itself.
  cut = lambda size, block: min(block, -(-size // LANES) * LANES)
  block_q, block_k = cut(T, blocks.block_q), cut(S, blocks.block_k)
  step = blocks.step if block_q % blocks.step == 0 else block_q
  tiles = -(-S // block_k)
  # Keys and values twice; backward also two sums in float32, and twice the
  # two gradients, in float32 at most.
  number = 4 * operand_bytes + (24 if direction == "backward" else 0)
  most = max(1, _CHUNK_BYTES // (number * max(H, LANES) * block_k))
  num_chunks = -(-tiles // most)
  chunk_k = -(-tiles // num_chunks) * block_k
  return dict(block_q=block_q, block_k=block_k, step=step, chunk_k=chunk_k)
