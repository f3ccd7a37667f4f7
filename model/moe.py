"""A mixture of experts: a router sends each token to a few feed-forwards.

Tokens of padding are never routed and never counted. What the layer reports
are sums over tokens and rows, so that any split of a batch adds up to the same
loss.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from model import weights
from model.attention import View
from model.config import ModelConfig, Moe
from model.dispatch import Wire, apply_experts
from model.execution import Execution
from model.linear import SAVED_NAME
from model.mlp import ACTIVATIONS, MLP
from pallas_kernels.dot import dot
from pallas_kernels.grouped_matmul.op import grouped_matmul
from sharding.regions import by_device
from sharding.rules import mesh_axes, sharding

# Sums over tokens, by name, float32.
Stats = dict[str, jax.Array]


class Router(nnx.Module):
  """Scores of experts: a projection, float32 under every precision policy.

  ST-MoE (arXiv:2202.08906, section 3.3): the exponentials that follow amplify
  what rounding does to logits.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    """Declares w [D, E], and the bias [E] of the choice if there is one."""
    D, moe = config.embed_dim, config.moe
    self.w = weights.weight(
      rngs, weights.fan_in(D), embed=D, expert=moe.num_experts
    )
    if moe.bias_rate is not None:
      self.bias = weights.weight(rngs, weights.zeros, expert=moe.num_experts)
    else:
      self.bias = None

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Logits, float32 [B, T, E]."""
    logits_BTE = dot("BTD,DE->BTE", x_BTD, self.w[...], "float32")
    return checkpoint_name(logits_BTE, SAVED_NAME)


class GroupedLinear(nnx.Module):
  """A matrix for each expert."""

  def __init__(self, initializer, *, rngs: nnx.Rngs, **dims: int):
    """Declares w, [E, inputs, outputs]; `dims` are its logical dims."""
    self.w = weights.weight(rngs, initializer, **dims)


class MoE(nnx.Module):
  """The layer that stands where a dense model has its MLP."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    """Declares the weights: gate and up [E, D, F], down [E, F, D]."""
    D, F, E = config.embed_dim, config.mlp_dim, config.moe.num_experts
    self.config = config
    self.router = Router(config, rngs=rngs)
    widen = functools.partial(
      GroupedLinear, weights.fan_in(D), expert=E, embed=D, mlp=F
    )
    self.gate = widen(rngs=rngs) if config.gated else None
    self.up = widen(rngs=rngs)
    back = weights.fan_in(F, branches=2 * config.num_layers)
    self.down = GroupedLinear(back, rngs=rngs, expert=E, mlp=F, embed=D)
    if config.moe.num_shared:
      # Experts that all see the same tokens are one that is as wide as all.
      self.shared = MLP(config, rngs=rngs, width=config.moe.num_shared * F)
    else:
      self.shared = None

  def __call__(
    self, x_BTD: jax.Array, view: View, execution: Execution
  ) -> tuple[jax.Array, Stats]:
    """Maps [B, T, D] to [B, T, D].

    Args:
      x_BTD: tokens; those of segment 0 may hold anything, NaN included.
      view: segments, the order of tokens in a row, and whether there is a
        cache.
      execution: how to run.

    Returns:
      The output, 0 for padding, and sums over the tokens of a row, float32:
      router_loss_B, what `model.moe` adds to the loss; balance_B and z_B, the
      two losses without their factors; counts_BE, the choices of each expert;
      dropped_B, the choices that found their expert full.
    """
    moe = self.config.moe
    if view.segment_ids is None:
      real_BT = jnp.ones(x_BTD.shape[:2], bool)
    else:
      real_BT = view.segment_ids != 0
      x_BTD = jnp.where(real_BT[..., None], x_BTD, jnp.zeros((), x_BTD.dtype))
    logits_BTE = execution.shard(self.router(x_BTD), ("batch", "seq", None))
    scores_BTE = _SCORES[moe.scores](logits_BTE)
    y_BTD, counts_BE, dropped_B = self._routed(
      x_BTD, scores_BTE, real_BT, view, execution
    )
    if self.shared is not None:
      y_BTD = y_BTD + self.shared(x_BTD, execution)
    losses = balance_losses(scores_BTE, counts_BE, real_BT, moe)
    z_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
    z_B = jnp.sum(jnp.where(real_BT, z_BT, 0.0), axis=1)
    stats = {
      "router_loss_B": moe.balance_loss * losses + moe.z_loss * z_B,
      "balance_B": losses,
      "z_B": z_B,
      "counts_BE": counts_BE,
      "dropped_B": dropped_B,
    }
    return y_BTD, stats

  def _routed(self, x_BTD, scores_BTE, real_BT, view: View, execution):
    """The sum of each token's experts; counts [B, E]; dropped choices [B]."""
    moe, mesh, rules = self.config.moe, execution.mesh, execution.rules
    arrays = {
      "x": x_BTD,
      "scores": scores_BTE,
      "real": real_BT,
      "numbers": view.numbers,
      "bias": self.router.bias,
      "gate": self.gate and self.gate.w,
      "up": self.up.w,
      "down": self.down.w,
    }
    arrays = {n: x[...] for n, x in arrays.items() if x is not None}
    capacity = None
    if moe.capacity_factor is not None and view.cached is None:
      capacity = capacity_of(moe, x_BTD.shape[1])
    local = functools.partial(_local, self.config, execution, capacity)
    if mesh is None:
      return local(_Axes((), (), ()), arrays)
    place = lambda *x: sharding("moe", *x, mesh, rules).spec
    split = lambda name: tuple(
      axis for axis in mesh_axes(name, rules) if mesh.shape[axis] > 1
    )
    specs = {n: place(x.shape, _NAMES[n]) for n, x in arrays.items()}
    rows = place(x_BTD.shape[:1], ("batch",))
    axes = _Axes(split("seq"), split("mlp"), split("expert"))
    run = by_device(
      functools.partial(local, axes),
      mesh,
      in_specs=(specs,),
      out_specs=(specs["x"], rows, rows),
    )
    return run(arrays)


_SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}

# Dims of what a device reads.
_NAMES = {
  "x": ("batch", "seq", None),
  "scores": ("batch", "seq", None),
  "real": ("batch", "seq"),
  "numbers": ("batch", "seq"),
  "bias": (None,),
  "gate": ("expert", None, "mlp"),
  "up": ("expert", None, "mlp"),
  "down": ("expert", "mlp", None),
}


class _Axes(NamedTuple):
  """The mesh axes that split the sequence, F and the experts."""

  seq: tuple[str, ...]
  mlp: tuple[str, ...]
  expert: tuple[str, ...]


def _local(
  config: ModelConfig,
  execution: Execution,
  capacity: int | None,
  axes: _Axes,
  arrays: dict[str, jax.Array],
):
  """`MoE._routed` on one device: its tokens, its experts, its part of F."""
  moe = config.moe
  B, T, D = arrays["x"].shape
  E, k = moe.num_experts, moe.num_active
  choices_BTk, gates_BTk = choose(arrays["scores"], arrays.get("bias"), moe)
  choices_BTk = jnp.where(arrays["real"][..., None], choices_BTk, E)
  counts_BE = jnp.sum(jax.nn.one_hot(choices_BTk, E), axis=(1, 2))
  dropped_B = jnp.zeros((B,), jnp.float32)
  if capacity is not None:
    fits_BTk = _first(choices_BTk, arrays["numbers"], E, capacity, axes.seq)
    dropped = ~fits_BTk & (choices_BTk < E)
    dropped_B = jnp.sum(dropped, axis=(1, 2), dtype=jnp.float32)
    choices_BTk = jnp.where(fits_BTk, choices_BTk, E)
  gates_BTk = jnp.where(choices_BTk < E, gates_BTk, 0.0)

  matmul = functools.partial(
    grouped_matmul,
    operands=execution.precision.operands,
    impl=execution.experts,
    platform=execution.platform,
  )

  def feed(rows_RD, sizes_E):
    def multiply(x, name):
      return checkpoint_name(matmul(x, arrays[name], sizes_E), SAVED_NAME)

    act = ACTIVATIONS[config.activation]
    up = multiply(rows_RD, "up").astype(jnp.float32)
    if config.gated:
      hidden = act(multiply(rows_RD, "gate").astype(jnp.float32)) * up
    else:
      hidden = act(up)
    return multiply(hidden.astype(execution.precision.activations), "down")

  wire = None
  if axes.expert:
    experts = arrays["up"].shape[0]
    # All tokens may choose one device, each with as many experts as it has.
    bound = B * T * min(k, experts)
    if capacity is not None:
      bound = min(bound, experts * B * min(capacity, T))
    wire = Wire(axes.expert, bound, ragged=execution.platform != "cpu")
  out_NkD = apply_experts(
    feed,
    arrays["x"].reshape(B * T, D),
    choices_BTk.reshape(B * T, k),
    num_experts=E,
    wire=wire,
  )
  gates_Nk1 = gates_BTk.reshape(B * T, k, 1)
  y_ND = jnp.sum(gates_Nk1 * out_NkD.astype(jnp.float32), axis=1)
  if axes.mlp:
    y_ND = jax.lax.psum(y_ND, axes.mlp)
  if axes.seq:
    counts_BE, dropped_B = jax.lax.psum((counts_BE, dropped_B), axes.seq)
  y_BTD = y_ND.reshape(B, T, D).astype(execution.precision.activations)
  return y_BTD, counts_BE, dropped_B


def choose(
  scores_BTE: jax.Array, bias_E: jax.Array | None, moe: Moe
) -> tuple[jax.Array, jax.Array]:
  """The experts of each token and what each counts.

  The k largest of scores plus bias; the bias decides who is chosen, not what
  it counts (arXiv:2408.15664, equation 3), and has no gradient.

  Returns:
    int32 and float32 [B, T, k], the likeliest expert first.
  """
  order_BTE = jax.lax.stop_gradient(scores_BTE)
  if bias_E is not None:
    order_BTE = order_BTE + jax.lax.stop_gradient(bias_E)[None, None]
  choices_BTk = jax.lax.top_k(order_BTE, moe.num_active)[1]
  gates_BTk = jnp.take_along_axis(scores_BTE, choices_BTk, axis=-1)
  if moe.normalize:
    gates_BTk /= jnp.sum(gates_BTk, axis=-1, keepdims=True) + 1e-20
  return choices_BTk, gates_BTk * moe.scale


def capacity_of(moe: Moe, length: int) -> int:
  """The most tokens of a row of `length` positions that an expert takes."""
  share = moe.capacity_factor * moe.num_active * length / moe.num_experts
  return math.ceil(share)


def _first(choices_BTk, numbers_BT, E: int, capacity: int, seq_axes):
  """Whether each choice is among the first `capacity` of its expert and row.

  Tokens come in the order of their numbers; of one token, its likelier expert
  first. So it depends on earlier tokens alone whether one is dropped.
  """
  T = numbers_BT.shape[1]
  if seq_axes:
    gather = functools.partial(jax.lax.all_gather, axis=1, tiled=True)
    choices_BTk = gather(choices_BTk, seq_axes)
    numbers_BT = gather(numbers_BT, seq_axes)

  def row(choices_Tk, numbers_T):
    order_T = jnp.argsort(numbers_T)
    in_order_M = choices_Tk[order_T].reshape(-1)
    by_expert_M = jnp.argsort(in_order_M, stable=True)
    sorted_M = in_order_M[by_expert_M]
    start_M = jnp.searchsorted(sorted_M, sorted_M)
    rank_M = jnp.arange(len(sorted_M)) - start_M
    fits_M = (rank_M < capacity)[jnp.argsort(by_expert_M)]
    return fits_M.reshape(choices_Tk.shape)[jnp.argsort(order_T)]

  fits_BTk = jax.vmap(row)(choices_BTk, numbers_BT)
  if seq_axes:
    first = T * jax.lax.axis_index(seq_axes)
    fits_BTk = jax.lax.dynamic_slice_in_dim(fits_BTk, first, T, axis=1)
  return fits_BTk


def balance_losses(
  scores_BTE: jax.Array, counts_BE: jax.Array, real_BT: jax.Array, moe: Moe
) -> jax.Array:
  """The balance loss of each row times its tokens, float32 [B].

    T sum_i f_i P_i,  f_i = E / (k T) counts_i,  P_i = mean_t s_ti / sum_j s_tj

  1 a token where all experts are chosen alike. DeepSeek-V3 (arXiv:2412.19437,
  equations 17 to 20), of a row in place of a sequence; T counts its tokens.
  As the choices are, f follows the bias, which V3's formula leaves out. With
  softmax and k = 1 it is that of Switch (arXiv:2101.03961, equation 4) within
  a row.

  Args:
    scores_BTE: float32, before normalisation.
    counts_BE: float32, the choices of each expert.
    real_BT: bool, what is no padding.
    moe: gives E and k.
  """
  # Sigmoids may all be 0.
  sums_BT1 = jnp.sum(scores_BTE, axis=-1, keepdims=True) + 1e-20
  shares_BTE = scores_BTE / sums_BT1
  shares_BE = jnp.sum(jnp.where(real_BT[..., None], shares_BTE, 0.0), axis=1)
  tokens_B = jnp.maximum(jnp.sum(real_BT, axis=1, dtype=jnp.float32), 1.0)
  products_B = jnp.sum(jax.lax.stop_gradient(counts_BE) * shares_BE, axis=-1)
  return moe.num_experts / moe.num_active * products_B / tokens_B


def summed(stats: Stats, numbers: jax.Array, num_layers: int) -> Stats:
  """The statistics of a model, from those of some of its layers.

  Those of all parts of a batch and of all its layers add up.

  Args:
    stats: as of `MoE`, with layers in front, [l, ...].
    numbers: int32 [l], which layers of the model they are.
    num_layers: L.

  Returns:
    router_loss_B, what `model.moe` adds to the loss, float32 [B];
    expert_counts, choices of each expert, [L, E]; and scalars: balance and z,
    the two losses without their factors, and dropped, choices that found
    their expert full.
  """
  counts_lE = jnp.sum(stats["counts_BE"], axis=1)
  counts_LE = jnp.zeros((num_layers, counts_lE.shape[1]), jnp.float32)
  return {
    "router_loss_B": jnp.sum(stats["router_loss_B"], axis=0),
    "expert_counts": counts_LE.at[numbers].add(counts_lE),
    "balance": jnp.sum(stats["balance_B"]),
    "z": jnp.sum(stats["z_B"]),
    "dropped": jnp.sum(stats["dropped_B"]),
  }
