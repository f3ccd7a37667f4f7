"""Our own generation, in the form that `serve.chat` runs.

A bf16 model is decoded in float32 arithmetic: XLA on a CPU multiplies one row
by a bf16 matrix many times slower than by the same numbers in float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import turns
from benchmarks.contestants import decoding
from model.transformer import Transformer
from serve.config import Sampling
from serve.generate import generate
from serve.weights import for_decoding


def main():
  config, options = decoding.parse()

  @jax.jit
  def make():
    model = Transformer(config, rngs=nnx.Rngs(0))
    if options.dtype == "float32":
      return model
    rounded = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)
    return jax.tree.map(rounded, model)

  model = for_decoding(make())
  shape = options.batch, decoding.PROMPT
  prompts = np.random.default_rng(0).integers(1, config.vocab_size, shape)

  def run(count):
    sampling = Sampling(max_new_tokens=count, temperature=0.0)
    for [answer] in generate(model, prompts.tolist(), sampling):
      assert len(answer.ids) == count

  turns.serve(decoding.stopwatch(run), jax=jax.__version__)


if __name__ == "__main__":
  main()
