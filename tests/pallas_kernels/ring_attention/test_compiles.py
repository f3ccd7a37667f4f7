"""Rings of TPUs, by the TPU's own compiler."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.aot import topology_devices
from pallas_kernels.ring_attention.op import ring_attention

pytestmark = pytest.mark.tpu_compiler


def program(topology: str, num_devices: int, *, length: int, H: int, form: str):
  """HLO of gradients of a zig-zag ring, causal, with segments."""
  devices = np.array(topology_devices(topology)[:num_devices])
  mesh = Mesh(devices, ("context",), axis_types=(AxisType.Auto,))
  split = P(None, "context")

  def local(q, k, v, ids):
    return ring_attention(
      q,
      k,
      v,
      axis_name="context",
      form=form,
      order="zigzag",
      segment_ids=ids,
      operands="bfloat16",
      out_dtype="bfloat16",
      impl="tpu",
    )

  run = jax.shard_map(
    local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
  )
  loss = lambda *x: run(*x).astype(np.float32).sum()
  of = functools.partial(
    jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, split)
  )
  vector = lambda heads: of((1, length, heads, H), "bfloat16")
  grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  lowered = grad.lower(
    vector(2), vector(1), vector(1), of((1, length), np.int32)
  )
  return lowered.compile().as_text()


def check(text: str, form: str):
  for kernel in ("flash_attention_fwd", "flash_attention_bwd"):
    assert f"%{kernel}" in text
  collective = "collective-permute" if form == "ring" else "all-gather"
  assert collective in text


def test_compiles():
  check(program("v5e:2x2", 2, length=1024, H=64, form="ring"), "ring")


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("form", ["ring", "all_gather"])
@pytest.mark.parametrize("length", [2048, 8192, 32768])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_compiles_at_any_length(topology, form, length, H):
  check(program(topology, 4, length=length, H=H, form=form), form)
