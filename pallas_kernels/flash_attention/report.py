"""What the op tells `pallas_kernels.report` about itself."""

import itertools
from collections.abc import Mapping, Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention import report_shape, tiles, tpu, tuning
from pallas_kernels.flash_attention.attend import attend
from pallas_kernels.flash_attention.options import Options, Rows
from pallas_kernels.report_case import Case, Part

SHAPE = report_shape.SHAPE
FORWARD, BACKWARD = "flash_attention_fwd", "flash_attention_bwd"
SIZES = tuning.Blocks._fields
BACKWARD_SIZES = tuple(f"backward_{name}" for name in SIZES)


def make_case(
  chip: str, shape: Mapping[str, int], blocks: Mapping[str, int] | None
) -> Case:
  """Forward and backward, bf16; see `report_case`."""
  B, N, K, T, H = (
    shape[name] for name in ("batch", "heads", "kv_heads", "length", "head_dim")
  )
  options = Options(
    left=None,
    right=0 if shape["causal"] else None,
    scale=H**-0.5,
    soft_cap=None,
    dropout_rate=0.0,
    operands="bfloat16",
    out_dtype="bfloat16",
  )
  table = tuning.TABLE
  if blocks:
    pick = lambda names: tuning.Blocks(*(blocks[name] for name in names))
    table = {(chip, H): (pick(SIZES), pick(BACKWARD_SIZES))}
  use_table = lambda: mock.patch.dict(tuning.TABLE, dict(table), clear=True)
  with use_table():
    plans = [
      tuning.find(direction, T, T, H, 2, chip)
      for direction in ("forward", "backward")
    ]

  def loss(q_BNTH, k_BKSH, v_BKSH, *ids_BT):
    rows = Rows(jnp.arange(T, dtype=jnp.int32)[None], *(ids_BT or (None,)))
    # Layers of a model would hand arrays over in this layout, or XLA would.
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BNTH, k_BKSH, v_BKSH))
    out, _ = attend(tpu, options, 0, q, k, v, rows, rows, None)
    return out.astype(jnp.float32).sum()

  def gradients(*args):
    # Both directions are traced in here, the backward one at the end.
    with use_table():
      return jax.grad(loss, argnums=(0, 1, 2))(*args)

  array = lambda heads: jax.ShapeDtypeStruct((B, heads, T, H), jnp.bfloat16)
  # The backward kernel is told which chunk of keys it has.
  chunk = np.zeros(1, np.int32)
  ids, known = (), {FORWARD: [], BACKWARD: [chunk]}
  if shape["segments"]:
    ids = (jax.ShapeDtypeStruct((B, T), jnp.int32),)
    real = Rows(None, jnp.asarray(report_shape.segment_ids(shape)))
    for kernel, plan in zip(known, plans):
      ranges = [
        tiles.ranges(real, plan[block], B, True)
        for block in ("block_q", "block_k")
      ]
      known[kernel] += list(map(np.asarray, jax.tree.leaves(ranges)))
  scores = report_shape.unmasked_scores(shape)
  shown = {name: plans[0][name] for name in SIZES}
  for shown_name, name in zip(BACKWARD_SIZES, SIZES):
    shown[shown_name] = plans[1][name]
  return Case(
    blocks=shown,
    function=gradients,
    args=(array(N), array(K), array(K), *ids),
    parts=(
      Part(
        name="forward",
        kernels=(FORWARD,),
        blocks=SIZES,
        useful_flops=report_shape.FORWARD_FLOPS * H * scores,
        scalars=known,
      ),
      Part(
        name="backward",
        kernels=(BACKWARD,),
        blocks=BACKWARD_SIZES,
        useful_flops=report_shape.BACKWARD_FLOPS * H * scores,
        scalars=known,
      ),
    ),
  )


def candidates(chip: str, shape: Mapping[str, int]) -> list[dict[str, int]]:
  """The same block sizes in both directions; the search judges each alone."""
  del chip
  T = shape["length"]
  grid = itertools.product((256, 512, 1024), (256, 512, 1024), (128, 256, 512))
  return [
    dict(zip(SIZES + BACKWARD_SIZES, 2 * sizes))
    for sizes in grid
    if max(sizes) <= T and sizes[2] <= min(sizes[:2])
  ]


def table_entry(
  chip: str, shape: Mapping[str, int], best: Mapping[str, Mapping[str, int]]
) -> str:
  """A line of `tuning.TABLE`, of the best blocks of each part."""
  show = lambda part: f"Blocks{tuple(best[part].values())}"
  key = (chip, shape["head_dim"])
  return f"{key}: ({show('forward')}, {show('backward')}),"


def one_segment(operands: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
  """The scalars of a kernel in a program whose rows are one segment each.

  Args:
    operands: dims of the kernel's operands, as it was compiled.

  Returns:
    Of its first operands: the number of the chunk of keys, in the backward
    kernel, and `tiles.Ranges` of queries and of keys.
  """
  chunk = [np.zeros(1, np.int32)] if operands[0] == (1,) else []
  rest = list(operands[len(chunk) :])
  pairs = list(itertools.takewhile(lambda dims: len(dims) == 2, rest))
  side = len(pairs) // 2
  lengths = [dims[2] for dims in rest[len(pairs) :][:2]]  # of q and k, BNTH
  made = []
  for (B, blocks), length in zip(pairs[::side], lengths) if side else ():
    number = np.arange(blocks, dtype=np.int32)
    block = length // blocks
    ends = [number * block, number * block + block - 1] if side != 3 else []
    ids = [number * 0 + 1, number * 0 + 1, number * 0] if side != 2 else []
    made += [np.tile(row, (B, 1)) for row in (*ends, *ids)]
  return chunk + made
