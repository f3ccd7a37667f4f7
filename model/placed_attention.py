"""Where attention runs: under XLA, as a kernel on each device's heads and
rows, or over a sequence that devices share."""

import functools

import jax

from model.execution import Execution
from pallas_kernels.flash_attention.op import flash_attention
from pallas_kernels.ring_attention.op import ring_attention
from pallas_kernels.ring_attention.ulysses import ulysses_attention
from pallas_kernels.rotary.op import rotary
from sharding.regions import by_device, manual_axes
from sharding.rules import spec

# What says who may see whom: arguments of `flash_attention`, and their dims.
Rows = dict[str, jax.Array]
_DIMS = {
  "q_positions": ("batch", "seq"),
  "k_positions": ("batch", "keys"),
  "q_segment_ids": ("batch", "seq"),
  "k_segment_ids": ("batch", "keys"),
  "dropout_words_2BNT": (None, "batch", "heads", "seq"),
}


def in_kernels(execution: Execution) -> bool:
  """Whether attention is a Pallas kernel, which XLA cannot split by itself."""
  on_tpu = execution.platform == "tpu"
  return {"auto": on_tpu, "tpu": True}.get(execution.attention, False)


def rotated(
  execution: Execution, in_kernel: bool, cos_BTP, sin_BTP, heads: str, x_BTNH
):
  """Queries or keys, whose heads have that logical name, after `rotary`."""
  mesh, rules = execution.mesh, execution.rules
  op = functools.partial(rotary, impl="tpu" if in_kernel else "xla")
  if mesh is None or not in_kernel:
    return op(x_BTNH, cos_BTP, sin_BTP)
  vectors = spec(("batch", "seq", heads, None), rules)
  rows = "batch" if len(cos_BTP) == len(x_BTNH) else None
  angles = spec((rows, "seq", None), rules)
  rotate = by_device(
    op, mesh, in_specs=(vectors, angles, angles), out_specs=vectors
  )
  return rotate(x_BTNH, cos_BTP, sin_BTP)


def attended(
  execution: Execution, settings: dict, q_BTNH, k_BSKH, v_BSKH, rows: Rows
) -> jax.Array:
  """Attention of [B, T, N, H].

  Args:
    execution: how to run.
    settings: of `flash_attention`, all that is no array.
    q_BTNH: queries.
    k_BSKH: keys; where the sequence is split, those of the same tokens.
    v_BSKH: values.
    rows: where the sequence is split, with positions.

  Raises:
    ValueError: the rules part query heads from the key heads they read.
  """
  mesh, rules = execution.mesh, execution.rules
  axis = execution.context_axis
  if mesh is None or not (axis or in_kernels(execution)):
    return flash_attention(q_BTNH, k_BSKH, v_BSKH, **settings, **rows)
  if rules.heads != rules.kv_heads and k_BSKH.shape[2] > 1:
    raise ValueError(
      f"rules.heads={rules.heads} and rules.kv_heads={rules.kv_heads} part"
      " query heads from the key heads that they read; make them equal, or set"
      " attention='xla' and mesh.context=1"
    )
  form = execution.context
  if form == "ring" and execution.platform == "cpu" and manual_axes():
    # XLA lets all devices of a CPU meet in a permutation, also those of other
    # stages of a pipeline, which may be in another branch.
    form = "all_gather"
  of_keys = "seq" if axis else None
  queries = spec(("batch", "seq", "heads", None), rules)
  keys = spec(("batch", of_keys, "kv_heads", None), rules)
  row_specs = {
    name: spec([of_keys if d == "keys" else d for d in _DIMS[name]], rules)
    for name in rows
  }

  def local(q, k, v, rows):
    if axis is None:
      return flash_attention(q, k, v, **settings, **rows)
    return _over_context(form, axis, settings, q, k, v, rows)

  attend = by_device(
    local, mesh, in_specs=(queries, keys, keys, row_specs), out_specs=queries
  )
  return attend(q_BTNH, k_BSKH, v_BSKH, rows)


def _over_context(form, axis: str, settings: dict, q, k, v, rows: Rows):
  """The same with this device's part of the sequence."""
  if form == "ulysses":
    op = ulysses_attention
  else:
    op = functools.partial(ring_attention, form=form)
  return op(
    q,
    k,
    v,
    axis_name=axis,
    positions=rows["q_positions"],
    segment_ids=rows.get("q_segment_ids"),
    dropout_words_2BNT=rows.get("dropout_words_2BNT"),
    **settings,
  )
