"""The kernels go through the TPU's own compiler."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot
from pallas_kernels.flash_attention.op import flash_attention

pytestmark = pytest.mark.tpu_compiler
CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
# What a call may ask for; each changes the kernels.
FEATURES = {
  "all masks, sinks, dropout": dict(
    H=64, window=100, soft_cap=20.0, segments=1, positions=1, sinks=1, words=1
  ),
  "bidirectional window": dict(H=80, causal=False, window=(5, 200)),
  "float32": dict(H=96, causal=False, dtype="float32", words=1),
  "float32, long": dict(T=32768, H=128, dtype="float32"),
  "decode": dict(T=1, S=1000, H=128, q_offset=700),
  "one token": dict(T=1, S=1, H=128),
  "chunked prefill, ragged": dict(T=300, S=700, H=256, q_offset=400, window=99),
}


def compiled(
  chip: str,
  *,
  T: int = 512,
  S: int | None = None,
  H: int,
  N: int = 2,
  K: int = 1,
  dtype: str = "bfloat16",
  segments: bool = False,
  positions: bool = False,
  sinks: bool = False,
  words: bool = False,
  **settings,
):
  """Value and gradients of one row, for a chip."""
  S = T if S is None else S
  of = jax.ShapeDtypeStruct
  rows = {}
  for use, name in ((segments, "segment_ids"), (positions, "positions")):
    if use:
      rows[f"q_{name}"] = of((1, T), np.int32)
      rows[f"k_{name}"] = of((1, S), np.int32)
  if sinks:
    rows["sinks_N"] = of((N,), np.float32)
  if words:
    rows["dropout_words_2BNT"] = of((2, 1, N, T), np.uint32)
    settings["dropout_rate"] = 0.1

  def loss(q, k, v, rows):
    out = flash_attention(
      q, k, v, operands=dtype, out_dtype=dtype, impl="tpu", **rows, **settings
    )
    return out.astype(jnp.float32).sum()

  vectors = (of((1, size, n, H), dtype) for size, n in ((T, N), (S, K), (S, K)))
  grad = jax.value_and_grad(loss, argnums=(0, 1, 2))
  return aot.compile_for(chip, grad, *vectors, rows)


def check(program):
  text = program.as_text()
  for kernel in ("flash_attention_fwd", "flash_attention_bwd"):
    assert f"%{kernel}" in text


def test_compiles():
  check(compiled("v5e:2x2", **FEATURES["all masks, sinks, dropout"]))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("feature", FEATURES)
def test_compiles_what_may_be_asked(feature, chip):
  check(compiled(chip, **FEATURES[feature]))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("chip", "T", "H"),
  list(itertools.product(CHIPS, (2048, 8192, 32768), (64, 128, 256))),
)
def test_compiles_at_any_length(chip, T, H):
  program = compiled(chip, T=T, H=H, segments=True)
  check(program)
  # Output, cotangents, partial gradients: so many [T, H], padded to whole
  # lanes, and nothing of T x T.
  row = max(H, 128) * 2
  assert program.memory_analysis().temp_size_in_bytes < 40 * T * row
