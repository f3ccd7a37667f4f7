"""Rotations as complex numbers; scaled frequencies derived dim by dim."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from model.config import Rope
from model.rope import angles, frequencies
from pallas_kernels.rotary.op import rotary
from tests.tolerances import tolerance

H = 16
PLAIN = Rope(theta=50.0)
LLAMA3 = Rope(
  theta=5e5,
  scaling="llama3",
  factor=8.0,
  original_max_positions=256,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
)
YARN = Rope(theta=1e4, scaling="yarn", factor=4.0, original_max_positions=512)


def random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype("float32")


def turned(x, positions, rope):
  return np.asarray(
    rotary(jnp.asarray(x), *angles(rope, x.shape[-1], jnp.asarray(positions)))
  )


def test_turns_pairs_in_the_complex_plane():
  x = random(2, 5, 3, H)
  positions = np.array([[0, 1, 2, 3, 4], [7, 3, 60, 0, 1]], np.int32)
  z = x[..., : H // 2] + 1j * x[..., H // 2 :].astype(np.complex128)
  for pair in range(H // 2):
    angle = positions * 50.0 ** (-2 * pair / H)
    z[..., pair] *= np.exp(1j * angle)[..., None]
  want = np.concatenate([z.real, z.imag], axis=-1)
  np.testing.assert_allclose(
    turned(x, positions, PLAIN), want, **tolerance("matmul")
  )


@pytest.mark.parametrize("rope", [PLAIN, LLAMA3, YARN], ids=str)
def test_scores_depend_on_distance_alone(rope):
  q, k = random(1, 1, 1, H), random(1, 1, 1, H, seed=1)

  def score(query, key):
    at = lambda p: np.array([[p]], np.int32)
    return (turned(q, at(query), rope) * turned(k, at(key), rope)).sum()

  base = score(9, 4)
  np.testing.assert_allclose(score(109, 104), base, **tolerance("gradient"))
  assert abs(score(10, 4) - base) > 0.01


def test_keeps_the_dtype_and_computes_in_float32():
  x = random(1, 4, 2, H)
  positions = np.array([[0, 11, 222, 3333]], np.int32)
  low = rotary(
    jnp.asarray(x, jnp.bfloat16), *angles(PLAIN, H, jnp.asarray(positions))
  )
  assert low.dtype == jnp.bfloat16
  rounded = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
  np.testing.assert_allclose(
    np.float32(low),
    turned(rounded, positions, PLAIN),
    **tolerance("elementwise", "bfloat16"),
  )


def test_linear_scaling_divides_positions():
  x = random(1, 4, 2, H)
  positions = np.array([[0, 1, 5, 12]], np.int32)
  linear = Rope(theta=50.0, scaling="linear", factor=4.0)
  np.testing.assert_allclose(
    turned(x, 4 * positions, linear),
    turned(x, positions, PLAIN),
    **tolerance("elementwise"),
  )


def test_llama3_scaling_by_wavelength():
  got, factor = frequencies(LLAMA3, 64)
  assert factor == 1.0
  bands = set()
  for pair, frequency in enumerate(got):
    plain = 5e5 ** (-2 * pair / 64)
    wavelength = 2 * math.pi / plain
    if wavelength < 256 / 4:
      band, want = "kept", plain
    elif wavelength > 256 / 1:
      band, want = "divided", plain / 8
    else:
      keep = (256 / wavelength - 1) / (4 - 1)
      band, want = "blended", (1 - keep) * plain / 8 + keep * plain
    bands.add(band)
    assert frequency == pytest.approx(want, rel=1e-6), (pair, band)
  assert bands == {"kept", "divided", "blended"}


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_scaling_by_rotations(truncate):
  rope = Rope(
    theta=1e4,
    scaling="yarn",
    factor=4.0,
    original_max_positions=512,
    beta_fast=20.0,
    beta_slow=2.0,
    truncate=truncate,
  )
  got, factor = frequencies(rope, 64)
  assert factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
  # The dims (on a fine grid) whose pair turns 20 times and 2 times in 512.
  grid = np.linspace(0, 32, 2_000_001)
  rotations = 512 * 1e4 ** (-2 * grid / 64) / (2 * math.pi)
  first = grid[np.argmin(abs(rotations - 20.0))]
  last = grid[np.argmin(abs(rotations - 2.0))]
  if truncate:
    first, last = math.floor(first), math.ceil(last)
  for pair, frequency in enumerate(got):
    plain = 1e4 ** (-2 * pair / 64)
    if pair <= first:
      want = plain
    elif pair >= last:
      want = plain / 4
    else:
      divided = (pair - first) / (last - first)
      want = plain * (1 - divided) + plain / 4 * divided
    assert frequency == pytest.approx(want, rel=1e-5), pair
  assert 0 < first < last < 31


def test_yarn_multiplies_cosines_and_sines():
  positions = jnp.arange(3, dtype=jnp.int32)[None]
  given = Rope(
    theta=1e4,
    scaling="yarn",
    factor=4.0,
    original_max_positions=512,
    attention_factor=1.5,
  )
  cos, sin = angles(given, H, positions)
  np.testing.assert_allclose(
    cos**2 + sin**2, np.full(cos.shape, 2.25), **tolerance("norm")
  )
  unit = sum(x**2 for x in angles(YARN, H, positions))
  np.testing.assert_allclose(
    unit,
    np.full(cos.shape, (0.1 * math.log(4.0) + 1) ** 2),
    **tolerance("norm"),
  )


def test_scalings_need_the_original_length():
  for scaling in ("llama3", "yarn"):
    with pytest.raises(ValueError, match="original_max_positions"):
      Rope(theta=1e4, scaling=scaling, factor=2.0)
  with pytest.raises(TypeError, match="theta"):
    Rope()
