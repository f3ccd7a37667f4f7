"""Rules of parallel training, each broken once; the matrix must see it.

A break is an edit of one file of the production code, made in a copy of the
tree, and the cell that must go red.
"""

import dataclasses

from tests.train import matrix


@dataclasses.dataclass(frozen=True)
class Break:
  """One rule.

  Attributes:
    rule: what is broken, in a few words.
    file: which file is edited.
    old: its text, found there once.
    new: what takes its place.
    mesh: axis -> devices of the cell.
    settings: values of factors that the cell needs.
    cell: other attributes of it.
  """

  rule: str
  file: str
  old: str
  new: str
  mesh: dict[str, int]
  settings: dict[str, object] = dataclasses.field(default_factory=dict)
  cell: dict[str, object] = dataclasses.field(default_factory=dict)

  def comparison(self) -> matrix.Cell:
    """The cell, with the first value of every factor that is not said."""
    mesh = tuple(self.mesh.items())
    values = {
      name: self.settings.get(name, choices[0])
      for name, choices in matrix.factors(mesh).items()
    }
    return matrix.Cell(mesh, tuple(values.items()), **self.cell)


_STEP, _LOSSES = "train/step.py", "model/losses.py"
_GRADIENTS = "train/gradients.py"
_RING = "pallas_kernels/ring_attention/op.py"
_ULYSSES = "pallas_kernels/ring_attention/ulysses.py"
_PLACED = "model/placed_attention.py"
_MOE, _DISPATCH = "model/moe.py", "model/dispatch.py"
_RING_OF_2 = dict(mesh=dict(context=2), settings=dict(context="ring"))
_GATHER_OF_2 = dict(mesh=dict(context=2), settings=dict(context="all_gather"))
_ULYSSES_OF_2 = dict(mesh=dict(context=2), settings=dict(context="ulysses"))
_DATA_OF_2 = dict(mesh=dict(data=2), settings=dict(accumulation=4))

BREAKS = [
  Break(
    "replicas do not add up their sums",
    _GRADIENTS,
    "totals = map(jnp.sum, totals, dims)",
    "totals = map(lambda x, dim: x.take(0, dim), totals, dims)",
    **_DATA_OF_2,
  ),
  Break(
    "replicas are averaged, not added: packing weighs rows unequally",
    _GRADIENTS,
    "totals = map(jnp.sum, totals, dims)",
    "w = jnp.sum(each[1], axis=0)\n"
    "    totals = map(lambda x, dim: jnp.sum(x * (jnp.mean(w) / w).reshape("
    "[1] * dim + [-1] + [1] * (x.ndim - dim - 1)), dim), totals, dims)",
    **_DATA_OF_2,
  ),
  Break(
    "micro-batches weigh the same",
    _GRADIENTS,
    "with_refs(tree.unflatten(grads))(jnp.ones_like(minimised))",
    "with_refs(tree.unflatten(grads))(1 / sums[1])",
    **_DATA_OF_2,
  ),
  Break(
    "whole gradients of fsdp do not add up",
    "sharding/zero.py",
    "jnp.sum(total, axis=0), place",
    "total[0], place",
    mesh=dict(fsdp=2),
    settings=dict(accumulation=4, zero_stage=1),
  ),
  Break(
    "neighbouring rows have one number: dropout repeats",
    _STEP,
    '{"row_ids": jnp.arange(B, dtype=jnp.int32)}',
    '{"row_ids": jnp.arange(B, dtype=jnp.int32) // execution.mesh.size}',
    mesh=dict(data=2),
    cell=dict(dropout=True),
  ),
  Break(
    "devices of a sequence do not add up their losses",
    _LOSSES,
    "jax.lax.psum(x, tokens) if tokens else x",
    "x",
    **_RING_OF_2,
  ),
  Break(
    "a part of the vocabulary passes for the whole",
    _LOSSES,
    "vocab_axis=vocab or None",
    "vocab_axis=None",
    mesh=dict(tensor=2, context=2),
  ),
  Break(
    "targets keep the old order of tokens",
    _STEP,
    "if x.shape[:2] == (B, T) else x",
    'if x.shape[:2] == (B, T) and name != "targets" else x',
    **_RING_OF_2,
  ),
  Break(
    "segments are lost where a sequence is split",
    _PLACED,
    'segment_ids=rows.get("q_segment_ids")',
    "segment_ids=None",
    **_RING_OF_2,
  ),
  Break(
    "the ids of segments do not travel with the keys",
    _RING,
    "return (_merged(sums, values(keys)), _shifted(how, keys)), None",
    "return (_merged(sums, values(keys)),"
    " _Keys(*_shifted(how, keys[:2]), keys.rows)), None",
    **_RING_OF_2,
  ),
  Break(
    "the last keys of the ring are not read",
    _RING,
    "out, lse = _merged(sums, values(keys))",
    "out, lse = sums",
    **_RING_OF_2,
  ),
  Break(
    "gradients of keys stay one device too early",
    _RING,
    "grads = dq, *_shifted(how, tuple(dkv))",
    "grads = dq, *dkv",
    **_RING_OF_2,
  ),
  Break(
    "gradients of gathered keys are not added up",
    _RING,
    "      jax.lax.psum_scatter,\n      axis_name=how.axis_name,\n"
    "      scatter_dimension=impl.ROWS_AXIS,\n      tiled=True,",
    "      lambda x: jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("
    "how.axis_name) * k.shape[impl.ROWS_AXIS], k.shape[impl.ROWS_AXIS],"
    " impl.ROWS_AXIS),",
    **_GATHER_OF_2,
  ),
  Break(
    "heads come back in the wrong order of rows",
    _ULYSSES,
    "rows = dict(q_positions=gather(positions), k_positions=gather(positions))",
    "rows = dict(q_positions=gather(positions),"
    " k_positions=gather(positions)[:, ::-1])",
    **_ULYSSES_OF_2,
  ),
  Break(
    "every device takes the first key head",
    _ULYSSES,
    "head = device * K // num",
    "head = device * 0",
    mesh=dict(context=8),
    settings=dict(context="ulysses"),
  ),
  Break(
    "dropout follows the place of a token, not the token",
    "model/block.py",
    "fold(dropout_keys_B, branch), view.numbers",
    "fold(dropout_keys_B, branch), None",
    mesh=dict(context=2),
    settings=dict(context="ring"),
    cell=dict(dropout=True),
  ),
  Break(
    "parts of an expert do not add up",
    _MOE,
    "y_ND = jax.lax.psum(y_ND, axes.mlp)",
    "pass",
    mesh=dict(expert=2, tensor=2),
    settings=dict(model="moe"),
  ),
  Break(
    "each device of a sequence balances its own tokens",
    _MOE,
    "counts_BE, dropped_B = jax.lax.psum((counts_BE, dropped_B), axes.seq)",
    "pass",
    mesh=dict(context=2),
    settings=dict(model="moe"),
  ),
  Break(
    "each device of a sequence has the places of the first",
    _MOE,
    "first = T * jax.lax.axis_index(seq_axes)",
    "first = 0",
    mesh=dict(context=2),
    settings=dict(model="moe_capacity"),
  ),
  Break(
    "rows come back in another order",
    _DISPATCH,
    "came = arrivals_XX[:, me], rows_XX[:, me], starts_XX[:, me]",
    "came = starts_XX[:, me], rows_XX[:, me], starts_XX[:, me]",
    mesh=dict(expert=2),
    settings=dict(model="moe"),
  ),
  Break(
    "gradients of rows travel the way of the rows",
    _DISPATCH,
    "_exchange(wire, len(x_like), back, there, dy)",
    "_exchange(wire, len(x_like), there, back, dy)",
    mesh=dict(expert=2),
    settings=dict(model="moe"),
  ),
  Break(
    "a micro-batch weighs its routers by itself",
    "train/experts.py",
    'rows_B = batch["router_weights"] * stats["router_loss_B"]',
    'rows_B = jnp.sum(batch["loss_weights"]) / _num_tokens(batch)'
    ' * stats["router_loss_B"]',
    mesh=dict(expert=2),
    settings=dict(model="moe", accumulation=4),
  ),
]
