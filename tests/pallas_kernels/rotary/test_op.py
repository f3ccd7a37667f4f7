"""Every implementation against float64 complex numbers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import rope
from model.config import Rope
from pallas_kernels.aot import compile_for
from pallas_kernels.rotary import tpu
from pallas_kernels.rotary.op import HONOURS, rotary
from tests.tolerances import tolerance


def arrays(B=2, T=11, N=6, H=16, dtype="float32", shared=False):
  """x and the angles of its pairs."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(B, T, N, H)), dtype)
  angle = rng.uniform(-9, 9, size=(1 if shared else B, T, H // 2))
  return x, angle.astype(np.float32)


def rotated(x, angle, factor=1.0):
  """A pair of dims is a complex number, and a rotation a product."""
  first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
  turned = (first + 1j * second) * factor * np.exp(1j * angle[:, :, None])
  return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("impl", sorted(HONOURS))
@pytest.mark.parametrize(
  "settings",
  [
    dict(),
    dict(shared=True),
    dict(T=1),
    dict(dtype="bfloat16"),
    dict(N=1, H=6),
    # More rows than a block, heads that a block does not hold at once.
    dict(B=1, T=530, N=4, H=4),
  ],
  ids=str,
)
def test_value_and_gradient(impl, settings, monkeypatch):
  monkeypatch.setattr(tpu, "_BLOCK", 2 * 512 * 128)
  x, angle = arrays(**settings)
  dout = x[..., ::-1]
  # A factor, as of YaRN, makes the gradient differ from the inverse.
  cos, sin = 1.1 * np.cos(angle), 1.1 * np.sin(angle)
  out, vjp = jax.vjp(lambda x: rotary(x, cos, sin, impl=impl), x)
  (dx,) = vjp(dout)
  assert out.dtype == dx.dtype == x.dtype
  close = functools.partial(
    np.testing.assert_allclose, **tolerance("matmul", x.dtype)
  )
  close(np.asarray(out, np.float64), rotated(x, angle, 1.1))
  close(np.asarray(dx, np.float64), rotated(dout, -angle, 1.1))


def test_agrees_with_xla_at_the_angles_of_a_model():
  x, _ = arrays()
  positions = jnp.broadcast_to(jnp.arange(11)[None] * 3, (2, 11))
  cos, sin = rope.angles(Rope(theta=100.0), 16, positions)
  np.testing.assert_allclose(
    rotary(x, cos, sin, impl="tpu"),
    rotary(x, cos, sin, impl="xla"),
    **tolerance("elementwise"),
  )


def test_angles_are_constants():
  x, angle = arrays()
  loss = lambda cos: rotary(x, cos, jnp.sin(angle), impl="xla").sum()
  assert not jax.grad(loss)(jnp.cos(angle)).any()


def test_angles_that_do_not_fit_are_refused():
  x, angle = arrays()
  with pytest.raises(ValueError, match=r"wanted cos and sin of shape \[2 or 1"):
    rotary(x, angle[:, :-1], angle[:, :-1])
  with pytest.raises(ValueError, match=r"got cos .* and sin \(2, 11, 7\)"):
    rotary(x, angle, angle[..., :-1])
  with pytest.raises(ValueError, match="impl of rotary must be"):
    rotary(x, angle, angle, impl="fused")


def compile_for_chip(topology: str, T: int, H: int, dtype):
  def function(x, cos, sin, dout):
    out, vjp = jax.vjp(lambda x: rotary(x, cos, sin, impl="tpu"), x)
    return out, *vjp(dout)

  x = jax.ShapeDtypeStruct((2, T, 8, H), dtype)
  angle = jax.ShapeDtypeStruct((2, T, H // 2), jnp.float32)
  return compile_for(topology, function, x, angle, angle, x)


@pytest.mark.tpu_compiler
def test_forward_and_backward_compile_to_kernels():
  text = compile_for_chip("v5e:2x2", 300, 80, jnp.bfloat16).as_text()
  assert text.count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("H", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("T", [1, 2048, 32768])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_every_head_dim_compiles(topology, T, H, dtype):
  text = compile_for_chip(topology, T, H, dtype).as_text()
  assert text.count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.tpu_compiler
def test_nothing_is_copied_between_projection_and_attention():
  """The projection writes, and attention reads, what the kernel wants."""

  def function(x, w, cos, sin):
    q = jnp.einsum("btd,dnh->btnh", x, w)
    q = rotary(q, cos, sin, impl="tpu")
    # As attention takes it: another kernel, heads first.
    return jnp.swapaxes(rotary(q, cos, sin, impl="tpu"), 1, 2)

  array = jax.ShapeDtypeStruct
  angle = array((1, 2048, 64), jnp.float32)
  text = compile_for(
    "v5e:2x2",
    function,
    array((1, 2048, 1024), jnp.bfloat16),
    array((1024, 8, 128), jnp.bfloat16),
    angle,
    angle,
  ).as_text()
  assert text.count('custom_call_target="tpu_custom_call"') == 2
  assert "bf16[1,8,2048,128]" in text
  assert " transpose(" not in text
  # Weights and angles may be, never what has the size of x.
  copied = re.findall(r"= bf16\[([\d,]+)\]\S* copy\(", text)
  assert not {"1,2048,8,128", "1,8,2048,128"} & set(copied)
