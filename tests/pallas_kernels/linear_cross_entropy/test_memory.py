"""No implementation but the reference holds all logits, nor a second head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_cross_entropy.op import (
  linear_cross_entropy,
  linear_log_probs,
)
from tests.model.jaxprs import shapes
from tests.pallas_kernels.linear_cross_entropy import cases

B, T, D, V = 2, 300, 24, 301  # no size is a product of others
N = B * T


def gradient(op: str, impl: str, layout: str):
  """The function, and its abstract arguments."""
  head = (V, D) if layout == "VD" else (D, V)
  x, head, targets, weights = (
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (
      ((B, T, D), jnp.float32),
      (head, jnp.float32),
      ((B, T), jnp.int32),
      ((B, T), jnp.float32),
    )
  )
  settings = dict(layout=layout, impl=impl, chunk=128, blocks=cases.BLOCKS)

  def loss(x, head, targets, weights):
    if op == "cross_entropy":
      return linear_cross_entropy(x, head, targets, weights, **settings)[0]
    out = linear_log_probs(x, head, targets, weights > 0, **settings)
    return jnp.sum(out.targets * weights)

  return jax.grad(loss, (0, 1)), (x, head, targets, weights)


def largest_logits(found, layout) -> int:
  """Elements of the largest array with a dim of V that is not like the head."""
  head = (V, D) if layout == "VD" else (D, V)
  return max(
    (np.prod(s) for s in found if V in s and s[-2:] != head), default=0
  )


@pytest.mark.parametrize("layout", ["VD", "DV"])
@pytest.mark.parametrize("op", ["cross_entropy", "log_probs"])
def test_logits_of_a_chunk_at_most(op, layout):
  sizes = {}
  for impl in ("reference", "xla", "tpu"):
    function, args = gradient(op, impl, layout)
    found = shapes(jax.make_jaxpr(function)(*args))
    sizes[impl] = largest_logits(found, layout)
  assert sizes == dict(reference=N * V, xla=128 * V, tpu=128 * V)


@pytest.mark.parametrize("layout", ["VD", "DV"])
def test_the_head_is_not_transposed(layout):
  """Nor copied: only the gradient is an array of its shape."""
  for impl in ("xla", "tpu"):
    function, args = gradient("cross_entropy", impl, layout)
    found = shapes(jax.make_jaxpr(function)(*args))
    assert args[1].shape[::-1] not in found
