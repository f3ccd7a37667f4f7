"""Attention of a split sequence by an exchange of heads for rows.

DeepSpeed-Ulysses (arXiv:2309.14509, section 3): devices that hold all heads
of a part of the rows come to hold a part of the heads of all rows, attend as
one device does, and exchange back.
"""

import functools

import jax

from pallas_kernels.flash_attention.op import flash_attention


def ulysses_attention(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  *,
  axis_name: str,
  positions: jax.Array,
  segment_ids: jax.Array | None = None,
  sinks_N: jax.Array | None = None,
  dropout_words_2BNT: jax.Array | None = None,
  return_lse: bool = False,
  **settings,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """`flash_attention` of rows that are split over a mesh axis.

  Inside `jax.shard_map`, where arrays are a device's own. With fewer key
  heads than devices, each device takes the one key head that its queries
  read, of all rows.

  Args:
    q_BTNH: queries.
    k_BTKH: keys of the same rows.
    v_BTKH: values.
    axis_name: the mesh axis of the devices among which rows are split.
    positions: int32 [B, T], of queries and keys in their segments; rows may
      stand in any order.
    segment_ids: int32 [B, T].
    sinks_N: as in `flash_attention`.
    dropout_words_2BNT: of `dropout.row_words`.
    return_lse: as in `flash_attention`.
    **settings: the others of `flash_attention`.

  Returns:
    As there.

  Raises:
    ValueError: heads do not divide over the devices.
  """
  num, device = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  N, K = q_BTNH.shape[2], k_BTKH.shape[2]
  if N % num or (K % num and num % K):
    raise ValueError(
      f"context='ulysses' gives each of {num} devices equally many heads, but"
      f" a device has {N} query heads and {K} key heads; change mesh.context"
      " or mesh.tensor, or set context='ring'"
    )
  exchange = functools.partial(
    jax.lax.all_to_all, axis_name=axis_name, tiled=True
  )
  gather = functools.partial(
    jax.lax.all_gather, axis_name=axis_name, axis=1, tiled=True
  )

  def of_all_rows(x):
    if x.shape[2] % num == 0:
      return exchange(x, split_axis=2, concat_axis=1)
    head = device * K // num
    return jax.lax.dynamic_slice_in_dim(gather(x), head, 1, axis=2)

  rows = dict(q_positions=gather(positions), k_positions=gather(positions))
  if segment_ids is not None:
    ids = gather(segment_ids)
    rows |= dict(q_segment_ids=ids, k_segment_ids=ids)
  if dropout_words_2BNT is not None:
    words = exchange(dropout_words_2BNT, split_axis=2, concat_axis=3)
    rows["dropout_words_2BNT"] = words
  if sinks_N is not None:
    size = N // num
    rows["sinks_N"] = jax.lax.dynamic_slice_in_dim(sinks_N, device * size, size)
  out, lse = flash_attention(
    *map(of_all_rows, (q_BTNH, k_BTKH, v_BTKH)),
    return_lse=True,
    **rows,
    **settings,
  )
  home = functools.partial(exchange, split_axis=1, concat_axis=2)
  return (home(out), home(lse)) if return_lse else home(out)
