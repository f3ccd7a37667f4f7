"""A kernel with every kind of branch, whose schedule lies in data/.

Recorded with libtpu 0.0.52 for v5e; comments other than those that the parser
reads are cut. To record it anew: python -m tests.pallas_kernels.schedule_sample
"""

import pathlib
import re

import numpy as np

DATA = pathlib.Path(__file__).parent / "data"
NAME = "sample.1"
ROUNDS = 3  # of the loop in the middle region
# A causal table: 10 of 16 steps have something to do.
TABLE = np.tril(np.ones((4, 4), np.int8))


def _kernel(table, x, w, o, total):
  import jax
  import jax.numpy as jnp
  from jax.experimental import pallas as pl

  i, j = pl.program_id(0), pl.program_id(1)

  @pl.when(j == 0)
  def _first():
    total[...] = jnp.zeros_like(total)

  @pl.when(table[i, j].astype(jnp.int32) > 0)
  def _middle():
    def body(_, y):
      return jnp.dot(y, w[...], preferred_element_type=jnp.float32)

    total[...] += jax.lax.fori_loop(0, ROUNDS, body, x[...])

  @pl.when(j == 3)
  def _last():
    o[...] = jnp.exp(total[...])


def call(table, x, w):
  """table int8 [4, 4], x f32 [32, 512], w f32 [128, 128] -> f32 [32, 128]."""
  import jax
  import jax.numpy as jnp
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  return pl.pallas_call(
    _kernel,
    out_shape=jax.ShapeDtypeStruct((32, 128), jnp.float32),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(4, 4),
      in_specs=[
        pl.BlockSpec((8, 128), lambda i, j, table: (i, j)),
        pl.BlockSpec((128, 128), lambda i, j, table: (0, 0)),
      ],
      out_specs=pl.BlockSpec((8, 128), lambda i, j, table: (i, 0)),
      scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
    ),
    name="sample",
  )(table, x, w)


def arguments():
  """Of `call`, as shapes."""
  import jax
  import jax.numpy as jnp

  return (
    jax.ShapeDtypeStruct((4, 4), jnp.int8),
    jax.ShapeDtypeStruct((32, 512), jnp.float32),
    jax.ShapeDtypeStruct((128, 128), jnp.float32),
  )


def record() -> None:
  from pallas_kernels import aot, report

  with report.dump_folder() as folder:
    aot.compile_for("v5e:2x2", call, *arguments())
    DATA.mkdir(exist_ok=True)
    for path in DATA.glob("*"):
      path.unlink()
    for path in pathlib.Path(folder).glob(f"*-{NAME}-*"):
      text = path.read_text()
      if path.name.endswith("final_bundles.txt"):
        text = re.sub(r"/\*(?![^*]*region \d).*?\*/", "", text, flags=re.S)
      if "pre-finalize" in path.name:
        text = "\n".join(re.findall(r".*#allocation\d+ \[.*", text)) + "\n"
      if "schedule-analysis" not in path.name:
        number = path.name.split("-", 1)[1]
        (DATA / f"1-{number}").write_text(text)


if __name__ == "__main__":
  record()
