"""What a model costs: parameters, FLOPs a token, bytes of cache a token.

All figures derive from the declared weights: what is added to the model is
counted here without being told.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from model.config import ModelConfig
from model.execution import Remat
from model.transformer import Transformer


def num_parameters(config: ModelConfig) -> int:
  """Number of weights; a tied head is counted once."""
  return sum(_sizes(config).values())


def num_active_parameters(config: ModelConfig) -> int:
  """Number of weights that a token meets: k of the E experts."""
  return num_parameters(config) - _idle(config)


def flops_per_token(
  config: ModelConfig,
  seq_len: int,
  *,
  mask: Literal["exact", "full"] = "exact",
  backward: bool = True,
) -> float:
  """FLOPs of a token in the matmuls of the model, 2 a multiply-add.

    forward = 2 (W + 2 N H (A_1 + ... + A_L))
    forward and backward = 3 forward

  W is the number of weights that multiply a token: all projections, of E
  experts k, and the head, tied or not; the lookup of an embedding multiplies
  nothing. A_l is how many
  keys a query of layer l sees, averaged over the T = `seq_len` queries of a
  row; scores and weighted values take N H multiply-adds for each:

    full                    T
    causal                  (T + 1) / 2
    causal, window w        m - m (m - 1) / (2 T),  m = min(w, T)
    bidirectional, window w  2 m - 1 - m (m - 1) / T

  A backward pass has two matmuls for each of the forward pass. Source: PaLM
  (arXiv:2204.02311, appendix B), whose 6 N + 12 L H Q T is "full" without
  the embedding. As there, norms, softmax and activations are left out, and
  so is what rematerialisation computes again.

  Args:
    config: the model.
    seq_len: tokens a row, taken as one segment.
    mask: "exact" counts the keys that the mask lets a query see; "full"
      counts all T of them in every layer.
    backward: also count the gradients.
  """
  attention = _attention_flops(config, seq_len, mask)
  forward = 2 * _multiplying(config) + attention
  return forward * (3 if backward else 1)


def hardware_flops_per_token(
  config: ModelConfig, seq_len: int, remat: Remat, remat_every: int = 1
) -> float:
  """`flops_per_token` of a training step, and what it computes again.

  Attention that keeps no probabilities (arXiv:2205.14135) recomputes the
  scores in its backward pass: half its forward pass. On top of it comes

    "none"     nothing
    "dots"     nothing
    "block"    all layers, where `remat_every` is 1 but for projections that
               are only added to the layer's output
    "nested"   all layers for the inputs of each, then again as "block"

  With "dots" cuDNN's attention (`attention="gpu"`), which names nothing that
  could be kept, runs forward again; that is not counted here.

  The head is never computed again (`losses.cross_entropy`). Masked work that
  an implementation does in vain is not counted.

  Args:
    config: the model.
    seq_len: tokens a row, taken as one segment.
    remat: as in `Execution`.
    remat_every: as in `Execution`; for "block".
  """
  attention = _attention_flops(config, seq_len, "exact")
  layers = 2 * (_multiplying(config) - _head_size(config)) + attention
  # What is only added to the residual stream of the next group has no part
  # in the gradient: its matmul does not run again. The gradient of a router
  # needs what experts put out.
  mlp_down = "mlp.down" if config.moe is None else "moe.shared.down"
  added = {
    "pre": (mlp_down,),
    "parallel": (mlp_down, "attention.out"),
    "post": (),
    "sandwich": (),
  }[config.norm_placement]
  last = sum(2 * _sizes(config).get(f"layers.{path}.w", 0) for path in added)
  again = {
    "none": 0,
    "dots": 0,
    "block": layers - (last if remat_every == 1 else 0),
    "nested": 2 * layers - last,
  }[remat]
  return flops_per_token(config, seq_len) + attention / 2 + again


def layer_flops(config: ModelConfig, seq_len: int) -> tuple[list[float], float]:
  """FLOPs of a token, forward, in each layer, and in the head.

  Args:
    config: the model.
    seq_len: tokens a row, taken as one segment.

  Returns:
    Those of the layers in order, and that of the head; their sum is
    `flops_per_token(backward=False)`.
  """
  head = 2 * _head_size(config)
  weights = (2 * _multiplying(config) - head) / config.num_layers
  scores = 4 * config.num_heads * config.head_dim
  return [
    weights + scores * _seen(config, seq_len, kind)
    for kind in config.layer_kinds
  ], head


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
  """Bytes that a `KVCache` of `dtype` holds of one token, 2 L K H values.

  Local layers keep as much as global ones.
  """
  values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
  return values * jnp.dtype(dtype).itemsize


@functools.lru_cache
def _sizes(config: ModelConfig) -> dict[str, int]:
  """Path of each weight, layers stacked -> number of its elements."""
  model = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  leaves, _ = jax.tree_util.tree_flatten_with_path(model)
  name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
  return {name(path).removesuffix(".value"): x.size for path, x in leaves}


def _multiplying(config: ModelConfig) -> int:
  """Weights that a token is multiplied with: those of matrices, `w`."""
  linear = sum(n for path, n in _sizes(config).items() if path.endswith(".w"))
  return linear - _idle(config) + (_head_size(config) if config.tied else 0)


def _idle(config: ModelConfig) -> int:
  """Weights of the experts that a token does not go to."""
  moe, sizes = config.moe, _sizes(config)
  if moe is None:
    return 0
  paths = (f"layers.moe.{name}.w" for name in ("gate", "up", "down"))
  experts = sum(sizes.get(path, 0) for path in paths)
  return experts // moe.num_experts * (moe.num_experts - moe.num_active)


def _head_size(config: ModelConfig) -> int:
  return config.vocab_size * config.embed_dim


def _attention_flops(config: ModelConfig, T: int, mask: str) -> float:
  """Of the scores and weighted values of all layers, forward, a token."""
  seen = {"full": lambda kind: T, "exact": functools.partial(_seen, config, T)}
  keys = sum(seen[mask](kind) for kind in config.layer_kinds)
  return 4 * config.num_heads * config.head_dim * keys


def _seen(config: ModelConfig, T: int, kind: str) -> float:
  """Keys that a query of a layer of this kind sees, averaged over a row."""
  m = min(config.window, T) if kind == "local" else T
  if config.causal:
    return m - m * (m - 1) / (2 * T)
  # Without a window, the two sides of a query hold T - 1 keys, not 2 (T - 1).
  return 2 * m - 1 - m * (m - 1) / T if kind == "local" else T
