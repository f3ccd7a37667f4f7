"""Rotary position embedding (arXiv:2104.09864) and its scaled forms.

Dims are paired as (i, i + H / 2), the layout of Hugging Face checkpoints; the
rotation itself is `pallas_kernels/rotary`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from model.config import Rope


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
  """Angle per position of each pair of dims.

  Returns:
    Frequencies, float32 [H / 2] in radians per position, and the factor that
    multiplies cos and sin (1 but for YaRN).
  """
  exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
  plain = rope.theta**-exponent
  if rope.scaling == "linear":
    return (plain / rope.factor).astype(np.float32), 1.0
  if rope.scaling == "llama3":
    return _llama3(plain, rope).astype(np.float32), 1.0
  if rope.scaling == "yarn":
    factor = rope.attention_factor
    if factor is None:
      factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return _yarn(plain, rope, head_dim).astype(np.float32), factor
  return plain.astype(np.float32), 1.0


def _llama3(plain: np.ndarray, rope: Rope) -> np.ndarray:
  """Divides slow rotations, keeps fast ones, blends between (Llama 3.1)."""
  rotations = rope.original_max_positions * plain / (2 * math.pi)
  ramp = (rotations - rope.low_freq_factor) / (
    rope.high_freq_factor - rope.low_freq_factor
  )
  keep = np.clip(ramp, 0.0, 1.0)
  return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(plain: np.ndarray, rope: Rope, head_dim: int) -> np.ndarray:
  """NTK-by-parts interpolation (arXiv:2309.00071, section 3.2).

  The ramp is linear in the dim, as in the code that the authors published;
  in the paper it is linear in the number of rotations.
  """

  def dim_of(rotations: float) -> float:
    turns = rope.original_max_positions / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(rope.theta))

  low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  high = high if high > low else low + 1e-3  # avoid a division by zero
  ramp = (np.arange(head_dim // 2) - low) / (high - low)
  divide = np.clip(ramp, 0.0, 1.0)
  return (1 - divide) * plain + divide * plain / rope.factor


def angles(
  rope: Rope, head_dim: int, positions_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines, float32 [B, T, H / 2], for `rotary`."""
  freq, factor = frequencies(rope, head_dim)
  angle = positions_BT.astype(jnp.float32)[..., None] * freq[None, None]
  return jnp.cos(angle) * factor, jnp.sin(angle) * factor
