"""How close is equal: one table, by operation and dtype.

`np.testing.assert_allclose(ours, theirs, **tolerance("attention", dtype))`.
A figure is the rounding that the operation may honestly show against a float32
(for float32: another order of summation) reference on inputs of order 1. It is
never loosened to make a test pass.
"""

import numpy as np

# op -> dtype -> (rtol, atol)
_TABLE = {
  # One rounding a value: activations, RoPE, masks, optimizer updates.
  "elementwise": {"float32": (1e-6, 1e-6), "bfloat16": (8e-3, 8e-3)},
  # A sum over one dim of at most a few thousand.
  "matmul": {"float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
  # Statistics in float32, one rounding of the result.
  "norm": {"float32": (1e-5, 1e-6), "bfloat16": (1e-2, 1e-2)},
  # Two matmuls around a float32 softmax.
  "attention": {"float32": (1e-5, 1e-5), "bfloat16": (2e-2, 2e-2)},
  # The same with scores up to 1000, whose own rounding is 1e-4.
  "attention_large_logits": {"float32": (1e-3, 1e-3)},
  # A mean of log-probabilities, in nats; hidden states of the given dtype.
  "loss": {"float32": (1e-5, 1e-6), "bfloat16": (1e-2, 1e-2)},
  # Derivatives of whole blocks.
  "gradient": {"float32": (1e-4, 1e-5), "bfloat16": (4e-2, 4e-2)},
  # The same program on another mesh, in micro-batches or packed.
  "mesh": {"float32": (1e-5, 1e-5)},
  # Logits of a whole model against another implementation: absolute.
  "logits_parity": {"float32": (0.0, 1e-4)},
  # The same for a trained model of 30 layers.
  "logits_parity_trained": {"float32": (0.0, 1e-3)},
}


def tolerance(op: str, dtype="float32") -> dict[str, float]:
  """Returns {"rtol", "atol"} for `np.testing.assert_allclose`.

  Args:
    op: a key of the table.
    dtype: name or dtype of the values under test.

  Raises:
    KeyError: there is no such entry; a new one is a decision, not a default.
  """
  name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
  rtol, atol = _TABLE[op][name]
  return {"rtol": rtol, "atol": atol}
