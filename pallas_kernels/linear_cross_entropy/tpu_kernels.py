"""The two TPU kernels of a chunk of tokens; `tpu.py` says what they are for.

C tokens of a chunk; one matmul of a grid step is C x D x (a block of V). An
inner loop cuts it further, so that the program stays small.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.call import pallas_call
from pallas_kernels.linear_cross_entropy import tuning
from pallas_kernels.linear_cross_entropy.options import Options
from pallas_kernels.linear_cross_entropy.tuning import LANES, Blocks

FORWARD, BACKWARD = "linear_cross_entropy_fwd", "linear_cross_entropy_bwd"
# Below every logit; exp(LEAST - x) = 0. Not -inf: inf - inf = NaN.
LEAST = -1e30


def chunk_size(options: Options, x: jax.Array, head: jax.Array) -> int:
  """Tokens of a chunk: a multiple of 128, chunks as equal as can be."""
  num_tokens = x.size // x.shape[-1]
  limit = min(options.chunk, _blocks(options, x, head).tokens)
  num = max(1, pl.cdiv(num_tokens, _round_up(limit)))
  return max(LANES, _round_up(pl.cdiv(num_tokens, num)))


def forward(options: Options, x, head, *, keep_logits: bool):
  """The kernel for x [C, D].

  Returns:
    A function (x, head, targets) -> (logsumexp, logit of the target, logits),
    float32, [cores, C, 1] twice and [C, V]; the last only with `keep_logits`.
    Each core has walked over its own part of the vocabulary. Targets are int32
    [C, 1]; the logit of -1 is 0.
  """
  C, D = x.shape
  V = head.shape[options.vocab_dim]
  blocks = _blocks(options, x, head)
  grid = _Grid(V, min(blocks.forward_vocab, _round_up(V)), blocks.cores)
  size, rows = grid.size, _divisor(C, blocks.rows)

  def kernel(x, head, targets, lse, picked, *rest):
    logits, (top, total) = rest[:-2], rest[-2:]
    step, block = pl.program_id(1), grid.block()

    @pl.when(step == 0)
    def _():
      top[...] = jnp.full_like(top, LEAST)
      total[...] = jnp.zeros_like(total)
      picked[...] = jnp.zeros_like(picked)

    def part(i, _):
      at = pl.ds(pl.multiple_of(i * rows, LANES), rows)
      z = _dot(options, x[at, :], head[...], 1, 1 - options.vocab_dim)
      z = _cap(options, z * options.scale)
      token = block * size + _iota(z.shape, 1)
      if V % size:
        z = jnp.where(token < V, z, LEAST)
      for out in logits:
        out[at, :] = z
      hit = jnp.where(token == targets[at, :], z, 0.0)
      picked[at, :] += jnp.sum(hit, axis=1, keepdims=True)
      before = top[at, :]
      now = jnp.maximum(before, jnp.max(z, axis=1, keepdims=True))
      top[at, :] = now
      new = jnp.sum(jnp.exp(z - now), axis=1, keepdims=True)
      total[at, :] = total[at, :] * jnp.exp(before - now) + new
      return 0

    @grid.when_mine
    def _():
      jax.lax.fori_loop(0, C // rows, part, 0)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
      lse[...] = top[...] + jnp.log(total[...])

  cores = grid.cores
  out_shape = [jax.ShapeDtypeStruct((cores, C, 1), jnp.float32)] * 2
  out_specs = [_a_core((C, 1))] * 2
  if keep_logits:
    out_shape += [jax.ShapeDtypeStruct((C, V), jnp.float32)]
    out_specs += [grid.columns(C)]
  out_bytes = 4 * C * V if keep_logits else 0
  return pallas_call(
    kernel,
    name=FORWARD,
    grid=(cores, grid.steps),
    in_specs=[
      _whole((C, D)),
      grid.head(options, D),
      _whole((C, 1)),
    ],
    out_specs=out_specs,
    out_shape=out_shape,
    scratch_shapes=[pltpu.VMEM((C, 1), jnp.float32)] * 2,
    compiler_params=_params(blocks, options, x, head),
    cost_estimate=pl.CostEstimate(
      flops=2 * C * V * D,
      bytes_accessed=x.nbytes + head.nbytes + out_bytes,
      transcendentals=C * V,
    ),
  )


def backward(options: Options, x, head):
  """The kernel for x [C, D].

  Returns:
    A function (is_first, x, head, logits, targets, lse, to_all, to_target,
    dhead) -> (dx, dhead), float32, [cores, C, D] and like the head. This
    chunk's gradient is added to `dhead` in place, or written there if
    `is_first`, int32 [1, 1], is 1. dx is the sum over cores. All between
    logits and dhead are [C, 1]; see `tpu._gradients`. A token whose last two
    are 0 adds nothing.
  """
  C, D = x.shape
  V = head.shape[options.vocab_dim]
  blocks = _blocks(options, x, head)
  grid = _Grid(V, min(blocks.backward_vocab, _round_up(V)), blocks.cores)
  size = grid.size
  dims = D if D % LANES else _divisor(D, blocks.dims)
  rows = _divisor(C, blocks.rows)
  vocab_first = options.vocab_dim == 0

  def kernel(is_first, x, head, logits, *refs):
    targets, lse, to_all, to_target, before, dx, after, *scratch = refs
    grad, grad_transposed = scratch
    block, fresh = grid.block(), is_first[0, 0] == 1

    @pl.when(pl.program_id(1) == 0)
    def _():
      dx[...] = jnp.zeros_like(dx)

    def gradient(i, _):
      at = pl.ds(pl.multiple_of(i * rows, LANES), rows)
      z = logits[at, :]
      token = block * size + _iota(z.shape, 1)
      g = jnp.exp(z - lse[at, :]) * to_all[at, :]
      g -= jnp.where(token == targets[at, :], to_target[at, :], 0.0)
      g *= _slope(options, z)
      if V % size:
        g = jnp.where(token < V, g, 0.0)
      grad[at, :] = g.astype(grad.dtype)
      if vocab_first:
        # Once, for all features: the MXU sums over columns of the left side.
        grad_transposed[:, at] = g.astype(grad.dtype).T
      return 0

    def part(i, _):
      at = pl.ds(pl.multiple_of(i * dims, LANES) if dims < D else 0, dims)
      window = (slice(None), at) if vocab_first else (at, slice(None))
      w = head[window]
      if V % size:
        # Rows past the last hold anything, and 0 NaN = NaN.
        real = block * size + _iota(w.shape, options.vocab_dim) < V
        w = jnp.where(real, w, jnp.zeros_like(w))
      dx[:, at] += _dot(options, grad[...], w, 1, options.vocab_dim)
      if vocab_first:
        new = _dot(options, grad_transposed[...], x[:, at], 1, 0)
      else:
        new = _dot(options, x[:, at], grad[...], 0, 0)
      after[window] = jnp.where(fresh, 0.0, before[window]) + new
      return 0

    @grid.when_mine
    def _():
      jax.lax.fori_loop(0, C // rows, gradient, 0)
      jax.lax.fori_loop(0, D // dims, part, 0)

  operand = jnp.dtype(options.operands)
  transposed = (size, C) if vocab_first else (8, LANES)
  head_spec = grid.head(options, D)
  return pallas_call(
    kernel,
    name=BACKWARD,
    grid=(grid.cores, grid.steps),
    in_specs=[
      pl.BlockSpec(memory_space=pltpu.SMEM),
      _whole((C, D)),
      head_spec,
      grid.columns(C),
      *[_whole((C, 1))] * 4,
      head_spec,
    ],
    out_specs=[_a_core((C, D)), head_spec],
    out_shape=[
      jax.ShapeDtypeStruct((grid.cores, C, D), jnp.float32),
      jax.ShapeDtypeStruct(head.shape, jnp.float32),
    ],
    input_output_aliases={8: 1},
    scratch_shapes=[
      pltpu.VMEM((C, size), operand),
      pltpu.VMEM(transposed, operand),
    ],
    compiler_params=_params(blocks, options, x, head),
    cost_estimate=pl.CostEstimate(
      flops=4 * C * V * D,
      bytes_accessed=x.nbytes
      + head.nbytes
      + 4 * (C * V + C * D)
      + 8 * head.size,
      transcendentals=C * V,
    ),
  )


def _blocks(options: Options, x, head) -> Blocks:
  if options.blocks is not None:
    return options.blocks
  return tuning.find(x.shape[-1], _num_bytes(options, head))


def _num_bytes(options: Options, head) -> tuple[int, int]:
  return jnp.dtype(options.operands).itemsize, head.dtype.itemsize


def _params(blocks: Blocks, options: Options, x, head):
  # Besides the windows: the compiler's own, for what it takes apart.
  need = tuning.vmem_bytes(blocks, x.shape[-1], _num_bytes(options, head))
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "arbitrary"),
    vmem_limit_bytes=need + (12 << 20),
  )


class _Grid(NamedTuple):
  """Cores x steps; each core walks over blocks of its own, one after another.

  Where blocks do not divide by cores, the last core has nothing to do in its
  last steps: it stays at the last block, and the block in fast memory.

  Attributes:
    V: tokens of the vocabulary.
    size: of a block.
    cores: that share a program's memory.
  """

  V: int
  size: int
  cores: int

  @property
  def steps(self) -> int:
    return pl.cdiv(pl.cdiv(self.V, self.size), self.cores)

  def block(self):
    """The block of the grid step that runs."""
    return pl.program_id(0) * self.steps + pl.program_id(1)

  def when_mine(self, body):
    """Runs `body` where the step has a block."""
    num_blocks = pl.cdiv(self.V, self.size)
    if num_blocks == self.cores * self.steps:
      body()
    else:
      pl.when(self.block() < num_blocks)(body)

  def columns(self, C: int):
    """A block of an array [C, V]."""
    return pl.BlockSpec((C, self.size), lambda i, j: (0, self._at(i, j)))

  def head(self, options: Options, D: int):
    """A block of an array like the head."""
    if options.vocab_dim == 0:
      return pl.BlockSpec((self.size, D), lambda i, j: (self._at(i, j), 0))
    return pl.BlockSpec((D, self.size), lambda i, j: (0, self._at(i, j)))

  def _at(self, core, step):
    last = pl.cdiv(self.V, self.size) - 1
    return jnp.minimum(core * self.steps + step, last)


def _whole(shape):
  return pl.BlockSpec(shape, lambda i, j: (0, 0))


def _a_core(shape):
  """The part of an array [cores, *shape] that is a core's own."""
  return pl.BlockSpec(
    (None, *shape), lambda i, j: (i, 0, 0), pipeline_mode=pl.Buffered(1)
  )


def _dot(options: Options, x, y, x_dim: int, y_dim: int):
  """Sum over a dim of each, of operands in their dtype, float32 after that."""
  exact = options.operands == "float32"
  return jax.lax.dot_general(
    x.astype(options.operands),
    y.astype(options.operands),
    (((x_dim,), (y_dim,)), ((), ())),
    # The TPU would multiply float32 in bf16 passes unless told not to.
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )


def _cap(options: Options, z):
  if options.soft_cap is None:
    return z
  return options.soft_cap * jnp.tanh(z / options.soft_cap)


def _slope(options: Options, z):
  """The derivative of logits `z` by the bare product."""
  if options.soft_cap is None:
    return options.scale
  return options.scale * (1.0 - jnp.square(z / options.soft_cap))


def _iota(shape, dim: int):
  return jax.lax.broadcasted_iota(jnp.int32, shape, dim)


def _round_up(size: int) -> int:
  """To whole lanes."""
  return -(-size // LANES) * LANES


def _divisor(size: int, at_most: int) -> int:
  """The largest divisor of `size` in lanes that is no more than `at_most`."""
  lanes = size // LANES
  fitting = range(1, max(1, at_most // LANES) + 1)
  return LANES * max(n for n in fitting if lanes % n == 0)
