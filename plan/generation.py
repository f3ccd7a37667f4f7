"""One token of generation: the program of `serve.decode`, without weights.

`python -m plan.dryrun --loop=generate` compiles it. The rows of the batch are
in the middle of their answers, each with a cache of `data.seq_len` slots;
weights are float32, as `serve` takes them from a checkpoint.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from model.accounting import flops_per_token
from model.execution import Execution
from model.kv_cache import KVCache
from model.transformer import Transformer
from serve import decode, sampler
from serve.config import Sampling
from sharding.rules import replicated, sharding, tree_shardings
from train.assembly import make_execution
from train.run_config import PretrainConfig


@dataclasses.dataclass(frozen=True)
class Decoding:
  """A token for each row, drawn.

  Attributes:
    config: the model, rows and slots.
    execution: how it runs.
  """

  config: PretrainConfig
  execution: Execution

  def lower(self) -> jax.stages.Lowered:
    """Returns the program for the compiler; nothing is allocated.

    Raises:
      ValueError: weights or rows do not divide over the mesh.
    """
    data, mesh = self.config.data, self.execution.mesh
    assert mesh is not None
    rows, slots = data.global_batch_size, data.seq_len
    model = self._model()
    at_rows = lambda x: self._array(x, "batch")
    cache = jax.eval_shape(
      lambda: KVCache.zeros(
        self.config.model, rows, slots, self.execution.precision.operands
      )
    )
    heads = lambda x: self._array(x, None, "batch", "kv_heads")
    cache = dataclasses.replace(
      cache,
      k=jax.tree.map(heads, cache.k),
      v=jax.tree.map(heads, cache.v),
      positions=at_rows(cache.positions),
    )
    of_rows = lambda dtype, *shape: at_rows(
      jax.ShapeDtypeStruct((rows, *shape), dtype)
    )
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    state = decode.State(
      cache=cache,
      ids=of_rows(jnp.int32, slots),
      log_probs=of_rows(jnp.float32, slots),
      count=scalar,
      counts=of_rows(jnp.int32),
      positions=of_rows(jnp.int32),
      done=of_rows(jnp.bool_),
    )
    settings = jax.eval_shape(
      lambda: decode.Rows(
        keys=decode.row_keys(
          jnp.uint32(0),
          jnp.zeros((rows,), jnp.uint32),
          jnp.arange(rows),
        ),
        knobs=sampler.knobs([Sampling()] * rows),
        limits=jnp.zeros((rows,), jnp.int32),
        stop_ids=jnp.zeros((4,), jnp.int32),
      )
    )
    return decode.decode.lower(
      model,
      state,
      settings,
      scalar,
      of_rows(jnp.bool_),
      execution=self.execution,
    )

  def _model(self) -> Transformer:
    config, mesh = self.config.model, self.execution.mesh
    model = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    places = tree_shardings(model, mesh, self.config.rules)
    return jax.tree.map(
      lambda leaf, place: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=place
      ),
      model,
      places,
    )

  def _array(self, x, *names: str | None) -> jax.ShapeDtypeStruct:
    """An argument whose first dims have these names."""
    names += (None,) * (x.ndim - len(names))
    mesh, rules = self.execution.mesh, self.execution.rules
    place = sharding("a row of the batch", x.shape, names, mesh, rules)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def program(config: PretrainConfig, mesh: Mesh) -> Decoding:
  """The program on a mesh.

  Args:
    config: its model, rows, slots (`data.seq_len`), rules and precision.
    mesh: its devices, which may be those of a topology that is not here.

  Raises:
    ValueError: the mesh has a pipeline.
  """
  if mesh.shape["pipeline"] > 1:
    raise ValueError(
      "--loop=generate wants mesh.pipeline=1: a token would wait for all"
      f" stages in turn; got {mesh.shape['pipeline']}"
    )
  # A single new token cannot be split along the sequence.
  rules = dataclasses.replace(config.rules, seq=(), residual_seq=())
  return Decoding(config, make_execution(config.step, mesh, rules))


def work(config: PretrainConfig, num_devices: int) -> tuple[float, float]:
  """Tokens of a device in a step, and their FLOPs.

  Those of a token are the mean over an answer that fills the cache.
  """
  tokens = config.data.global_batch_size / num_devices
  a_token = flops_per_token(config.model, config.data.seq_len, backward=False)
  return tokens, tokens * a_token
