"""What the op tells `pallas_kernels.report` about itself: one chunk of tokens.

A call runs both kernels once a chunk, and nothing else of weight.
"""

import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.linear_cross_entropy import tpu_kernels, tuning
from pallas_kernels.linear_cross_entropy.options import Options
from pallas_kernels.report_case import Case, Part

# A head of Llama 3 8B, in float32 as it is trained; `transposed` is "DV".
SHAPE = dict(tokens=1024, features=4096, vocab=128256, bits=16, transposed=0)
_DTYPES = {16: "bfloat16", 32: "float32"}


def make_case(
  chip: str, shape: Mapping[str, int], blocks: Mapping[str, int] | None
) -> Case:
  """Both kernels of a chunk; see `report_case`."""
  C, D, V = shape["tokens"], shape["features"], shape["vocab"]
  layout = "DV" if shape["transposed"] else "VD"
  num_bytes = shape["bits"] // 8, 4
  chosen = tuning.find(D, num_bytes, chip)
  chosen = chosen._replace(**{**(blocks or {}), "tokens": C})
  if C % tuning.LANES:
    raise ValueError(f"tokens must be a multiple of 128, got {C}")
  options = Options(
    layout=layout,
    scale=1.0,
    soft_cap=None,
    z_loss=0.0,
    top_k=0,
    operands=_DTYPES[shape["bits"]],
    chunk=C,
    num_batch_shards=1,
    shard=None,
    vocab_axis=None,
    blocks=chosen,
  )

  def function(x, head, targets, weights, dhead):
    forward = tpu_kernels.forward(options, x, head, keep_logits=True)
    lse, picked, logits = forward(x, head, targets)
    backward = tpu_kernels.backward(options, x, head)
    is_first = jnp.zeros((1, 1), jnp.int32)
    columns = targets, jax.nn.logsumexp(lse, axis=0), weights, weights
    dx, dhead = backward(is_first, x, head, logits, *columns, dhead)
    return picked, dx, dhead

  head = (V, D) if layout == "VD" else (D, V)
  args = (
    jax.ShapeDtypeStruct((C, D), _DTYPES[shape["bits"]]),
    jax.ShapeDtypeStruct(head, jnp.float32),
    jax.ShapeDtypeStruct((C, 1), jnp.int32),
    jax.ShapeDtypeStruct((C, 1), jnp.float32),
    jax.ShapeDtypeStruct(head, jnp.float32),
  )
  matmul = 2.0 * C * D * V
  parts = (
    Part(
      name="forward",
      kernels=(tpu_kernels.FORWARD,),
      useful_flops=matmul,
      blocks=("rows", "forward_vocab"),
    ),
    Part(
      name="backward",
      kernels=(tpu_kernels.BACKWARD,),
      useful_flops=2 * matmul,
      blocks=("rows", "backward_vocab", "dims"),
    ),
  )
  return Case(
    blocks=chosen._asdict(), function=function, args=args, parts=parts
  )


def candidates(chip: str, shape: Mapping[str, int]) -> list[dict[str, int]]:
  """Block sizes to search; those that do not fit are refused on the way."""
  if shape["bits"] == 32:
    rows, vocab, dims = (128, 256), (128, 256), (256, 512)
  else:
    rows, vocab, dims = (256, 512), (256, 512), (1024, 2048)
  names = ("rows", "forward_vocab", "backward_vocab", "dims")
  return [
    dict(zip(names, (r, 2 * v, v, d)))
    for r, v, d in itertools.product(rows, vocab, dims)
  ]


def table_entry(
  chip: str, shape: Mapping[str, int], best: Mapping[str, Mapping[str, int]]
) -> str:
  """A line of `tuning.TABLE`."""
  both = {**best["forward"], **best["backward"]}
  blocks = tuning.Blocks(tokens=shape["tokens"], **both)
  return f"({chip!r}, {shape['bits']}): Blocks{tuple(blocks)},"
