"""The matmul rate that model FLOPs utilisation is measured against."""

import dataclasses
import time

import jax
import jax.numpy as jnp

# Dense bfloat16 FLOP/s of one `jax.Device`, by the start of its kind; the
# longest match wins.
# TPU: cloud.google.com/tpu/docs, the page of each version (v4: a device is a
# chip; v2 and v3: a device is a core, half a chip).
# GPU: NVIDIA's data sheets, without sparsity.
_BFLOAT16_FLOPS = {
  "TPU v2": 22.5e12,
  "TPU v3": 61.5e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5": 459e12,
  "TPU v5p": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
  "TPU7x": 1153.5e12,  # Two devices a chip of 2307e12.
  "NVIDIA A100": 312e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H200": 989e12,
  "NVIDIA B200": 2250e12,
  "NVIDIA L4": 121e12,
  "NVIDIA L40": 181e12,
  "NVIDIA L40S": 362e12,
}


@dataclasses.dataclass(frozen=True)
class Peak:
  """FLOP/s of all devices together, and where the figure is from."""

  flops_per_second: float
  source: str


def peak(devices, *, operand_dtype) -> Peak | None:
  """The peak of a mesh's devices; None: of an unknown kind.

  Emulated CPU devices share the machine, so their peak is that of one; so do
  processes on CPUs, where there are several: these are for tests.

  Args:
    devices: all devices that the run uses, of one kind.
    operand_dtype: dtype of the run's matmul operands; only a CPU's rate is
      measured with it, tables are bfloat16's.
  """
  kind = devices[0].device_kind
  if devices[0].platform == "cpu":
    rate = measured_rate(jax.local_devices(backend="cpu")[0], operand_dtype)
    name = jnp.dtype(operand_dtype).name
    source = f"{rate / 1e9:.0f} GFLOP/s, measured here: {name} matmuls of a CPU"
    return Peak(rate, source)
  known = [name for name in _BFLOAT16_FLOPS if kind.startswith(name)]
  if not known:
    return None
  rate = _BFLOAT16_FLOPS[max(known, key=len)]
  source = f"{len(devices)} x {kind}, {rate / 1e12:.0f} TFLOP/s in bfloat16"
  return Peak(len(devices) * rate, source)


def measured_rate(device, operand_dtype, *, size=1024, repeats=5) -> float:
  """FLOP/s of the fastest of a few square matmuls, accumulated in float32."""
  x = jax.device_put(jnp.ones((size, size), operand_dtype), device)
  matmul = jax.jit(
    lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.float32)
  )
  matmul(x).block_until_ready()
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    matmul(x).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2 * size**3 / min(seconds)
