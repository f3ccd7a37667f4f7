"""Weights that any framework can make again: a seed from each tensor's name.

With these, a recorded value needs inputs and outputs only.
"""

import zlib

import numpy as np


def make(name: str, shape: tuple[int, ...], *, centre: float) -> np.ndarray:
  """A tensor of a Hugging Face checkpoint, float32.

  Scales are such that every part of a tiny model matters to its logits:
  scores of several units, norm weights far from one, large biases.

  Args:
    name: decides the values, and by its ending the kind.
    shape: as transformers stores it, [outputs, inputs].
    centre: mean of norm weights; 0 where they are stored minus one.
  """
  rng = np.random.default_rng(zlib.crc32(name.encode()))
  values = rng.standard_normal(shape)
  if name.endswith("norm.weight"):
    values = centre + 0.4 * values
  elif name.endswith("bias") or "embed_tokens" in name:
    values = 0.5 * values
  else:
    gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.5
    values = gain * values * shape[1] ** -0.5
  return values.astype(np.float32)
