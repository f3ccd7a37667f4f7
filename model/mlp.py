"""Feed-forward layers: GELU, ReLU^2 (arXiv:2109.08668), SwiGLU and GeGLU
(arXiv:2002.05202)."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from model import weights
from model.config import ModelConfig
from model.execution import Execution
from model.linear import Linear

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class MLP(nnx.Module):
  """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

  def __init__(
    self, config: ModelConfig, *, rngs: nnx.Rngs, width: int | None = None
  ):
    """Declares the weights: gate and up [D, F], down [F, D].

    Args:
      config: of the model.
      rngs: its `params` stream draws the weights.
      width: F; None: `config.mlp_dim`.
    """
    D, F, bias = config.embed_dim, width or config.mlp_dim, config.mlp_bias
    self.activation = config.activation
    widen = functools.partial(
      Linear, "BTD,DF->BTF", weights.fan_in(D), bias=bias, embed=D, mlp=F
    )
    if config.gated:
      self.gate = widen(rngs=rngs)
    else:
      self.gate = None
    self.up = widen(rngs=rngs)
    self.down = Linear(
      "BTF,FD->BTD",
      weights.fan_in(F, branches=2 * config.num_layers),
      rngs=rngs,
      bias=bias,
      mlp=F,
      embed=D,
    )

  def __call__(self, x_BTD: jax.Array, execution: Execution) -> jax.Array:
    """Maps [B, T, D] to [B, T, D]."""
    act = ACTIVATIONS[self.activation]
    up = self.up(x_BTD, execution).astype(jnp.float32)
    if self.gate is None:
      hidden = act(up)
    else:
      hidden = act(self.gate(x_BTD, execution).astype(jnp.float32)) * up
    hidden = hidden.astype(execution.precision.activations)
    hidden = execution.shard(hidden, ("batch", "seq", "mlp"))
    return self.down(hidden, execution)
