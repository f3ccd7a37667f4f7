"""Checkpoints: saved in the background, and verified before they are used.

A checkpoint is a folder `checkpoints/STEP` with the arrays of the state, as
Orbax writes them, and a manifest (train/manifest.py) with the config of the
run, the position in the data, the leaves of the state and the checksums of the
files. Orbax writes to a temporary folder and renames it; the manifest is in it
before the rename, so a killed process leaves no checkpoint that looks whole.
Steps count finished updates: checkpoint 10 continues with batch 10.

JAX is imported where it is used: the watchdog asks for the newest checkpoint
without it.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging

from train import manifest as manifest_lib

_STATE = "state"
# Fields of a state that have a meaning on one mesh only.
_OF_ONE_MESH = ("residual.", "replicas.")


class DamagedCheckpointError(ValueError):
  """A checkpoint is unfinished, or not as it was written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """What a checkpoint held.

  Attributes:
    step: updates that were done when it was saved.
    state: the pytree, placed as the abstract one asked.
    data: position in the data, as given to `Saver.save`.
    config: of the run that saved it, as a dict.
  """

  step: int
  state: Any
  data: dict
  config: dict


def steps(directory: str | pathlib.Path) -> list[int]:
  """Steps that have a checkpoint, whole or not, oldest first."""
  directory = pathlib.Path(directory)
  if not directory.is_dir():
    return []
  return sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal())


def verify(directory: str | pathlib.Path, step: int) -> dict:
  """Checks a checkpoint against its manifest and returns the manifest.

  Raises:
    DamagedCheckpointError: it is not whole; names the files that differ.
  """
  path = pathlib.Path(directory) / str(step)
  if not path.is_dir():
    raise DamagedCheckpointError(
      f"There is no checkpoint {path}; there are {steps(directory) or 'none'}."
    )
  try:
    manifest = manifest_lib.read(path)
  except ValueError as error:
    raise DamagedCheckpointError(f"Checkpoint {path}: {error}.") from None
  if manifest is None:
    raise DamagedCheckpointError(
      f"Checkpoint {path} is unfinished: it has no {manifest_lib.FILE}."
    )
  problems = manifest_lib.damage(path, manifest)
  if problems:
    raise DamagedCheckpointError(
      f"Checkpoint {path} is damaged:" + manifest_lib.some(problems)
    )
  return manifest


def newest(directory: str | pathlib.Path) -> pathlib.Path | None:
  """The newest checkpoint with a readable manifest; no checksum is compared."""
  for step in reversed(steps(directory)):
    path = pathlib.Path(directory) / str(step)
    try:
      if manifest_lib.read(path) is not None:
        return path
    except ValueError:
      continue
  return None


def run_config(directory: str | pathlib.Path) -> dict:
  """The config of the run that saved the newest checkpoint.

  Raises:
    DamagedCheckpointError: no checkpoint has a readable manifest.
  """
  path = newest(directory)
  if path is None:
    raise DamagedCheckpointError(f"No checkpoint in {directory} is whole.")
  return manifest_lib.read(path)["config"]


def restore(
  directory: str | pathlib.Path,
  step: int,
  abstract_state,
  *,
  config: Mapping | None = None,
  part: str | None = None,
) -> Restored:
  """Restores one checkpoint, after verifying it.

  Args:
    directory: the folder `checkpoints` of a run.
    step: which one.
    abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings: what is
      wanted and where. The mesh may be another than that of the saving run;
      what is owed to compressed sums begins anew then, and so do replicas
      that train apart, of which there are others: from the outer weights, with
      new states of their optimizers.
    config: of this run; on a mismatch the differing fields are named.
    part: "model": `abstract_state` is that field of the saved state, and only
      it is restored.

  Raises:
    DamagedCheckpointError: the checkpoint is not whole.
    ValueError: it is of another model: names, shapes or dtypes differ.
  """
  manifest = _verify_together(directory, step)
  saved = manifest["leaves"]
  if part is not None:
    abstract_state = {part: abstract_state}
    saved = _starting(f"{part}.", saved)
  wanted = manifest_lib.by_name(abstract_state)
  described = manifest_lib.describe(abstract_state)
  strange = tuple(
    field
    for field in _OF_ONE_MESH
    if _starting(field, saved) != _starting(field, described)
  )
  anew = _starting(strange, described)
  partial = part is not None or bool(_starting(strange, saved))
  for leaves in (saved, described):
    for name in _starting(strange, leaves):
      del leaves[name]
  problems = manifest_lib.mismatches(saved, described)
  path = pathlib.Path(directory) / str(step)
  if problems:
    message = f"Checkpoint {path} is of another model:"
    message += manifest_lib.some(problems)
    fields = differing_fields(manifest["config"], config or {})
    if fields:
      message += "\nThe configs differ in:" + manifest_lib.some(fields)
    raise ValueError(message + "\nChange the config, or use another workdir.")

  import jax
  import jax.numpy as jnp
  import orbax.checkpoint as ocp  # 0.8 s; a fresh run does not need it.

  items = {name: wanted[name] for name in described}
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    arrays = checkpointer.restore(
      (path / _STATE).absolute(),
      args=ocp.args.PyTreeRestore(
        item=items,
        restore_args=ocp.checkpoint_utils.construct_restore_args(items),
        partial_restore=partial,
      ),
    )
  for name in anew:
    leaf = wanted[name]
    if name.startswith("replicas.model."):
      repeat = lambda w, shape=leaf.shape: jnp.broadcast_to(w, shape)
      outer = arrays[name.removeprefix("replicas.")]
      arrays[name] = jax.jit(repeat, out_shardings=leaf.sharding)(outer)
    else:
      arrays[name] = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
  if "replicas." in strange:
    logging.warning(
      "Checkpoint %s has not the replicas of this run: these start from its"
      " outer weights.",
      path,
    )
  treedef = jax.tree.structure(abstract_state)
  state = jax.tree.unflatten(treedef, [arrays[name] for name in wanted])
  return Restored(
    step=step,
    state=state if part is None else state[part],
    data=manifest["data"],
    config=manifest["config"],
  )


def _starting(prefix: str | tuple[str, ...], leaves: dict) -> dict:
  """Those leaves whose names start so."""
  return {k: v for k, v in leaves.items() if k.startswith(prefix)}


def restore_latest(
  directory: str | pathlib.Path,
  abstract_state,
  *,
  config: Mapping | None = None,
  part: str | None = None,
) -> Restored | None:
  """Restores the newest whole checkpoint; None: there is none at all.

  Arguments are those of `restore`. Damaged checkpoints are passed over with a
  warning.

  Raises:
    ValueError: every checkpoint is damaged, or the newest whole one is of
      another model.
  """
  found = _as_first_process(steps(directory))
  for step in reversed(found):
    try:
      restored = restore(
        directory, step, abstract_state, config=config, part=part
      )
    except DamagedCheckpointError as error:
      logging.warning("%s\nTrying the checkpoint before it.", error)
      continue
    if step != found[-1]:
      logging.warning("Fell back to step %d, the newest whole one.", step)
    return restored
  if found:
    raise ValueError(
      f"None of the checkpoints {found} in {directory} is whole. Restore them"
      " from a copy, or use another workdir to start anew."
    )
  return None


def _verify_together(directory: str | pathlib.Path, step: int) -> dict:
  """`verify`, by process 0 for all: they must not take different ones."""
  import jax
  from jax.experimental import multihost_utils

  if jax.process_count() == 1:
    return verify(directory, step)
  path = pathlib.Path(directory) / str(step)
  error = DamagedCheckpointError(f"Checkpoint {path} is not whole.")
  is_whole = False
  if jax.process_index() == 0:
    try:
      verify(directory, step)
      is_whole = True
    except DamagedCheckpointError as found:
      error = found
  if not multihost_utils.broadcast_one_to_all(np.bool_(is_whole)):
    raise error
  return manifest_lib.read(path)


def _as_first_process(numbers: list[int]) -> list[int]:
  """What process 0 has; a shared folder need not look alike everywhere."""
  import jax
  from jax.experimental import multihost_utils

  if jax.process_count() == 1:
    return numbers
  count = int(multihost_utils.broadcast_one_to_all(np.int32(len(numbers))))
  mine = np.resize(np.array(numbers, np.int32), count)
  return multihost_utils.broadcast_one_to_all(mine).tolist()


def differing_fields(saved: Mapping, wanted: Mapping) -> list[str]:
  """The fields of the model that differ between two configs of runs."""

  def flatten(node, path):
    if isinstance(node, Mapping):
      flat = {}
      for key, value in node.items():
        flat |= flatten(value, f"{path}.{key}")
      return flat
    return {path: node}

  saved = flatten(saved.get("model"), "model")
  wanted = flatten(wanted.get("model"), "model")
  return [
    f"{name}: {saved.get(name)} in the checkpoint, {wanted.get(name)} here"
    for name in sorted({*saved, *wanted})
    if _plain(saved.get(name)) != _plain(wanted.get(name))
  ]


def _plain(value):
  return list(value) if isinstance(value, tuple) else value


class Saver:
  """Saves the states of one run and keeps the newest few.

  Everything but the copy from the devices happens in a background thread;
  a second save waits for the first.
  """

  def __init__(
    self,
    directory: str | pathlib.Path,
    *,
    keep: int,
    config: Mapping,
    start_step: int,
  ):
    """Readies the folder.

    Args:
      directory: the folder `checkpoints` of a run.
      keep: how many checkpoints to keep.
      config: of the run, as a dict that JSON can hold.
      start_step: where the run (re)starts. What is newer is damaged, or not
        wanted: it is moved to `set_aside` beside `directory`.
    """
    self.directory = pathlib.Path(directory).absolute()
    self._keep = keep
    self._config = config
    self._manager = None
    self._contents = {}
    import jax

    if jax.process_count() > 1:  # The others may still be reading.
      from jax.experimental import multihost_utils

      multihost_utils.sync_global_devices("restored")
    if jax.process_index() == 0:
      self.directory.mkdir(parents=True, exist_ok=True)
      for unfinished in self.directory.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(unfinished)
      for step in steps(self.directory):
        if step > start_step:
          self._set_aside(step)

  def save(self, step: int, state, data: Mapping) -> None:
    """Starts to save `state`; returns when it may be donated.

    Args:
      step: updates that are done.
      state: pytree of arrays.
      data: position in the data, as a dict that JSON can hold.
    """
    import orbax.checkpoint as ocp  # 0.8 s; not paid before the first save.

    if self._manager is None:
      self._manager = ocp.CheckpointManager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
          max_to_keep=self._keep,
          async_options=ocp.AsyncOptions(
            post_finalization_callback=self._write_manifest
          ),
          save_root_metadata=False,
        ),
      )
      # Orbax would ask from its thread, with the step of the checkpoint. JAX
      # takes the step that was asked last for the one that the run has reached,
      # and could choose one to stop at that this process has left behind.
      self._manager.reached_preemption = lambda step: False
    self._manager.wait_until_finished()
    self._contents = {
      "step": step,
      "data": data,
      "config": self._config,
      "leaves": manifest_lib.describe(state),
    }
    self._manager.save(
      step,
      args=ocp.args.Composite(
        **{_STATE: ocp.args.PyTreeSave(manifest_lib.by_name(state))}
      ),
      force=True,
    )

  def wait(self) -> None:
    """Waits until what was saved is on disk, and raises its errors."""
    if self._manager is not None:
      self._manager.wait_until_finished()

  def newest(self) -> pathlib.Path | None:
    """The newest checkpoint that is whole on disk."""
    self.wait()
    found = steps(self.directory)
    return self.directory / str(found[-1]) if found else None

  def close(self) -> None:
    """Waits, and frees what Orbax holds."""
    if self._manager is not None:
      self._manager.close()
      self._manager = None

  def _write_manifest(self) -> None:
    """Runs in the background thread, of process 0, before the rename."""
    step = self._contents["step"]
    unfinished = list(self.directory.glob(f"{step}.orbax-checkpoint-tmp*"))
    path = unfinished[0] if unfinished else self.directory / str(step)
    manifest_lib.write(path, self._contents)

  def _set_aside(self, step: int) -> None:
    aside = self.directory.parent / "set_aside"
    aside.mkdir(exist_ok=True)
    count = len(list(aside.iterdir()))
    target = aside / f"{step}_{count}"
    (self.directory / str(step)).rename(target)
    logging.warning("Checkpoint %d was moved to %s.", step, target)
