"""The parts that every training main puts together in the same way."""

import atexit
import os
import pathlib
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from data.loader import Loader, open_store
from data.tokenizer import Tokenizer
from model import accounting
from model.config import ModelConfig
from model.execution import Execution
from model.precision import resolve
from sharding.arrays import process_rows, to_global
from sharding.axes import Rules
from sharding.distributed import (
  DistributedConfig,
  coordinator_host,
  failed,
  join,
)
from sharding.stages import Layout
from train import layout, watchdog
from train.config import StepConfig
from train.held_out import make_evaluate
from train.monitor import FlopsPerToken
from train.peak import Peak, peak
from train.pipeline import describe, make_stages
from train.run_config import HeldOutConfig


def open_run(
  workdir: str,
  config_json: str,
  *,
  compilation_cache: str | None,
  distributed: DistributedConfig,
) -> pathlib.Path:
  """Joins the other processes, makes the run folder and writes config.json.

  Args:
    workdir: the run folder; it may be there already.
    config_json: of the run.
    compilation_cache: folder that keeps compiled programs between runs.
    distributed: the processes of the run.

  Returns:
    The run folder.
  """
  if compilation_cache is not None:
    jax.config.update("jax_compilation_cache_dir", compilation_cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  folder = pathlib.Path(workdir).absolute()
  if join(distributed) and distributed.watchdog:
    companion = watchdog.start(
      coordinator_host(), heartbeat_seconds=distributed.heartbeat_seconds
    )
    companion.saves_to(folder / "checkpoints")
    atexit.register(lambda: failed() or companion.done())
  if jax.process_index() == 0:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "config.json.partial"
    partial.write_text(config_json)
    os.replace(partial, folder / "config.json")
  return folder


def make_execution(config: StepConfig, mesh: Mesh, rules: Rules) -> Execution:
  """How the model runs on this mesh."""
  platform = mesh.devices.flat[0].platform
  return Execution(
    precision=resolve(config.precision, platform),
    attention=config.attention,
    loss=config.loss,
    context=config.context,
    remat=config.remat,
    remat_every=config.remat_every,
    offload_activations=config.offload.activations,
    unroll=config.unroll,
    loss_chunk=config.loss_chunk,
    mesh=mesh,
    rules=rules,
  )


def make_layout(
  config: StepConfig, model: ModelConfig, mesh: Mesh, *, seq_len: int
) -> Layout | None:
  """Which layers stand on which stage; None: the mesh has no pipeline.

  Says what comes of it.

  Args:
    config: schedule, micro-batches and virtual stages.
    model: whose layers.
    mesh: its axis `pipeline` gives the stages.
    seq_len: T.
  """
  made = layout.make_layout(
    model, mesh, seq_len=seq_len, virtual_stages=config.virtual_stages
  )
  stages = make_stages(config.schedule, made, mesh, config.accumulation)
  if stages is not None and jax.process_index() == 0:
    print(describe(stages, layout.imbalance(made, model, seq_len)))
  return made


def make_held_out(
  config: HeldOutConfig,
  tokenizer: Tokenizer,
  eval_step: Callable,
  *,
  seq_len: int,
  global_batch_size: int,
  overlong: str,
  execution: Execution,
) -> Callable[..., dict[str, float]] | None:
  """The evaluation of `train/held_out.py`; None: `config` names no store.

  Args:
    config: which store, and how much of it.
    tokenizer: that wrote it.
    eval_step: from `train.step.make_eval_step`.
    seq_len: T.
    global_batch_size: of training, taken where `config` has none.
    overlong: as in training.
    execution: its mesh and rules place the batches.
  """
  if config.path is None:
    return None
  mesh, rules = execution.mesh, execution.rules
  batch_size = config.global_batch_size or global_batch_size
  loader = Loader(
    open_store(config.path, tokenizer),
    seq_len=seq_len,
    global_batch_size=batch_size,
    rows=process_rows(batch_size, mesh, rules),
    overlong=overlong,
    shuffle=False,
    num_epochs=1,
  )
  place = lambda batch: to_global(batch, mesh, rules)
  return make_evaluate(eval_step, loader, place, num_batches=config.num_batches)


class Sized(Protocol):
  """What `utilisation` reads of a run's batches.

  Attributes:
    seq_len: T.
    sizes: int64 [pieces], positions of each piece of a document.
  """

  seq_len: int
  sizes: np.ndarray


def utilisation(
  model: ModelConfig, batches: Sized, execution: Execution
) -> dict[str, FlopsPerToken | Peak | None]:
  """The arguments of `train.loop.fit` that make it report MFU.

  Packed documents do not see each other: a causal query sees
  (sum of n^2 / sum of n + 1) / 2 keys on average, with n the tokens of each
  piece of a document. That mean length counts as the row's.

  Args:
    model: what is trained.
    batches: the training data; its `sizes` are the lengths of the pieces.
    execution: how, and on which devices.
  """
  sizes = batches.sizes
  length = max(1, round(float(np.sum(sizes**2) / np.sum(sizes))))
  return {
    "flops": FlopsPerToken(
      exact=accounting.flops_per_token(model, length),
      full=accounting.flops_per_token(model, batches.seq_len, mask="full"),
      hardware=accounting.hardware_flops_per_token(
        model, length, execution.remat, execution.remat_every
      ),
    ),
    "peak": peak(
      list(execution.mesh.devices.flat),
      operand_dtype=execution.precision.operands,
    ),
  }
