"""RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450)."""

import jax
import jax.numpy as jnp
from flax import nnx

from model import weights
from model.config import ModelConfig


class Norm(nnx.Module):
  """Normalises the last dim in float32, then scales it by a weight."""

  def __init__(
    self,
    config: ModelConfig,
    *,
    rngs: nnx.Rngs,
    kind: str | None = None,
    **dims: int,
  ):
    """Declares the weights.

    Args:
      config: gives `norm`, `norm_eps`, `norm_offset` and `norm_bias`.
      rngs: unused by the constant initialisers, kept for the signature.
      kind: "rms" or "layer"; None: `config.norm`.
      **dims: logical name and size of the dim to normalise.
    """
    self.kind = kind or config.norm
    self.eps = config.norm_eps
    self.offset = float(config.norm_offset)
    start = weights.zeros if config.norm_offset else weights.ones
    self.scale = weights.weight(rngs, start, **dims)
    if self.kind == "layer" and config.norm_bias:
      self.bias = weights.weight(rngs, weights.zeros, **dims)
    else:
      self.bias = None

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalises [..., D]; the result has the dtype of `x`."""
    y = x.astype(jnp.float32)
    if self.kind == "layer":
      y = y - jnp.mean(y, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(variance + self.eps)
    leading = (1,) * (x.ndim - 1)
    y = y * (self.scale[...] + self.offset).reshape(*leading, -1)
    if self.bias is not None:
      y = y + self.bias[...].reshape(*leading, -1)
    return y.astype(x.dtype)
