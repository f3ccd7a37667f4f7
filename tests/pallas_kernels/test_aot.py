"""Programs compiled for TPUs that are not here."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot

pytestmark = pytest.mark.tpu_compiler

X = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
W = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)


@pytest.mark.parametrize(
  ("topology", "kind", "count"),
  [
    ("v5e:2x2", "TPU v5 lite", 4),
    ("v5p:2x2x1", "TPU v5", 4),
    ("v6e:2x2", "TPU v6 lite", 4),
  ],
)
def test_devices_of_a_topology(topology, kind, count):
  devices = aot.topology_devices(topology)
  assert [device.device_kind for device in devices] == [kind] * count


def test_a_compiled_program_tells_its_cost():
  compiled = aot.compile_for("v5e:2x2", jnp.matmul, X, W)
  assert compiled.cost_analysis()["flops"] == 2 * 256 * 512 * 128
  memory = compiled.memory_analysis()
  assert memory.output_size_in_bytes == 256 * 128 * 2


def test_all_devices_hold_all_arrays():
  compiled = aot.compile_for("v5e:2x2", jnp.matmul, X, W, num_devices=4)
  assert "num_partitions=4" in compiled.as_text()
  memory = compiled.memory_analysis()
  assert memory.output_size_in_bytes == 256 * 128 * 2


def test_arguments_may_be_trees():
  compiled = aot.compile_for(
    "v5e:2x2", lambda t: t["x"] @ t["w"], dict(x=X, w=W)
  )
  assert compiled.cost_analysis()["flops"] == 2 * 256 * 512 * 128


def test_an_unknown_topology_is_refused():
  with pytest.raises(ValueError, match="cannot compile for 'v99:1x1'"):
    aot.topology_devices("v99:1x1")
