"""Replicas that train apart: their equations, their messages, their resumes."""

import dataclasses
import functools
import logging

import jax
import numpy as np
import pytest

from sharding.arrays import to_global
from sharding.axes import MeshConfig, Rules
from sharding.hlo import collectives
from sharding.mesh import make_mesh
from tests.train import tiny
from train import checkpoint
from train.config import (
  LocalSGDConfig,
  OffloadConfig,
  OptimizerConfig,
  StepConfig,
)
from train.state import abstract_state

# One worker: the programs are compiled once.
pytestmark = pytest.mark.xdist_group("train_local_sgd")

MODEL = dataclasses.replace(tiny.GQA, num_layers=2)
TWO = MeshConfig(data=2, fsdp=1)
# A small eps would make a gradient's rounding as large as the gradient.
ADAMW = OptimizerConfig(eps=1e-3)
SGD = OptimizerConfig(kind="sgd", clip_norm=None)
SYNC = LocalSGDConfig(steps=3, outer_learning_rate=0.6, outer_momentum=0.8)
DELAYED = dataclasses.replace(SYNC, delay=1)
# The last round is shorter than the others.
NUM_STEPS = 8


def program(
  local: LocalSGDConfig,
  mesh: MeshConfig = TWO,
  *,
  optimizer: OptimizerConfig = ADAMW,
  num_steps: int | None = NUM_STEPS,
  rows: int = tiny.ROWS,
  model=MODEL,
  accumulation: int = 1,
):
  """The leaves before the first step, their tree, the step, and its mesh."""
  return _program(local, mesh, optimizer, num_steps, rows, model, accumulation)


@functools.cache
def _program(local, mesh, optimizer, num_steps, rows, model, accumulation):
  devices = make_mesh(mesh)
  state, step = tiny.start(
    tiny.random_model(model),
    optimizer,
    devices,
    local=local,
    num_steps=num_steps,
    accumulation=accumulation,
  )
  leaves, tree = jax.tree.flatten(state)
  batch = to_global(tiny.packed_batch(rows=rows), devices, Rules())
  lowered = step.on_leaves.lower(leaves, batch)
  compiled = lowered.compile()
  return jax.device_get(leaves), tree, compiled, devices


def take(prepared, leaves, batch):
  """One step of a `program`, from the host to the host."""
  _, _, step, devices = prepared
  places = step.input_shardings[0][0]
  leaves = list(map(jax.device_put, leaves, places))
  return jax.device_get(step(leaves, to_global(batch, devices, Rules())))


def train(
  prepared, num_steps=NUM_STEPS, *, start=None, make_batch=tiny.packed_batch
):
  """The (state, metrics) after each step."""
  leaves, tree, *_ = prepared
  leaves = jax.tree.leaves(start) if start else leaves
  first = int(tree.unflatten(leaves).step)
  for i in range(first, num_steps):
    leaves, metrics = take(prepared, leaves, make_batch(i))
    yield tree.unflatten(leaves), metrics


def by_hand(local: LocalSGDConfig, num_steps: int = NUM_STEPS, **settings):
  """Two runs of one device each, that meet in numpy.

  Yields outer weights, the weights of each run, and the metrics of each.
  """
  rows = tiny.ROWS // 2
  alone = program(LocalSGDConfig(), MeshConfig(fsdp=1), rows=rows, **settings)
  states = [alone[1].unflatten(alone[0])] * 2
  outer = jax.tree.leaves(states[0].model)
  momentum = [np.zeros_like(w) for w in outer]
  models = [outer, outer]
  mu, rate = local.outer_momentum, local.outer_learning_rate

  def meet():
    for i, (w, a, b) in enumerate(zip(outer, *models, strict=True)):
      gradient = w - (a + b) / 2
      momentum[i] = mu * momentum[i] + gradient
      outer[i] = w - rate * (gradient + mu * momentum[i])

  for i in range(num_steps):
    is_last, before, found = i + 1 == num_steps, models, []
    late = local.delay and i and i % local.steps == 0 and not is_last
    outer = list(outer)
    if late:
      meet()
    batch, models = tiny.packed_batch(i), []
    for r in range(2):
      tree = jax.tree.structure(states[r].model)
      state = dataclasses.replace(states[r], model=tree.unflatten(before[r]))
      leaves, metrics = take(
        alone,
        jax.tree.leaves(state),
        {k: v[r * rows : (r + 1) * rows] for k, v in batch.items()},
      )
      states[r] = alone[1].unflatten(leaves)
      after = jax.tree.leaves(states[r].model)
      if late:
        kept = zip(outer, after, before[r], strict=True)
        after = [w + (now - then) for w, now, then in kept]
      models.append(after)
      found.append(metrics)
    if is_last or (not local.delay and (i + 1) % local.steps == 0):
      meet()
      models = [outer, outer]
    yield outer, models, found


def check_against_hand(local, mesh=TWO, *, num_steps=NUM_STEPS, **settings):
  prepared = program(local, mesh, num_steps=num_steps, **settings)
  settings.pop("accumulation", None)
  start = jax.tree.leaves(prepared[1].unflatten(prepared[0]).model)
  hand = by_hand(local, num_steps, **settings)
  moved = False
  for (state, metrics), (outer, models, each) in zip(
    train(prepared, num_steps), hand, strict=True
  ):
    ours = jax.tree.leaves(state.model)
    theirs = jax.tree.leaves(state.replicas.model)
    for w, of_all, want, *wants in zip(
      ours, theirs, outer, *models, strict=True
    ):
      np.testing.assert_allclose(of_all, np.stack(wants), atol=1e-5)
      np.testing.assert_allclose(w, want, atol=1e-5)
    moved |= any(np.any(a != b) for a, b in zip(ours, start, strict=True))
    weights = [m["weight_sum"] for m in each]
    loss = np.average([m["loss"] for m in each], weights=weights)
    norm = np.mean([m["grad_norm"] for m in each])
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics["weight_sum"], sum(weights), rtol=1e-6)
  assert moved  # A test of nothing would pass.


@pytest.mark.parametrize("local", [SYNC, DELAYED], ids=["sync", "delayed"])
def test_is_separate_runs_that_meet(local):
  check_against_hand(local)


@pytest.mark.slow
@pytest.mark.parametrize("local", [SYNC, DELAYED], ids=["sync", "delayed"])
@pytest.mark.parametrize(
  "settings",
  [
    dict(mesh=MeshConfig(data=2, fsdp=2)),
    dict(mesh=MeshConfig(data=2, fsdp=1, tensor=2)),
    dict(mesh=MeshConfig(data=2, fsdp=2), accumulation=2),
    # A boundary falls on the last step but one.
    dict(num_steps=7),
    dict(
      mesh=MeshConfig(data=2, fsdp=1, expert=2),
      model=dataclasses.replace(tiny.MOE, num_layers=1),
      num_steps=4,
    ),
  ],
  ids=["fsdp", "tensor", "accumulation", "end", "experts"],
)
def test_is_separate_runs_that_meet_on_other_meshes(local, settings):
  check_against_hand(local, **settings)


def unpacked(step: int):
  """Rows alike in their weights: each replica has as much to say."""
  batch = tiny.packed_batch(step, packed=False)
  batch["loss_weights"] = np.ones_like(batch["loss_weights"])
  return batch


@pytest.mark.slow
def test_meeting_after_every_step_is_data_parallel():
  """With SGD inside, and outside SGD that takes what it is given."""
  local = LocalSGDConfig(steps=1, outer_learning_rate=1.0, outer_momentum=0.0)
  apart = program(local, optimizer=SGD)
  together = program(LocalSGDConfig(), optimizer=SGD)
  for (ours, mine), (theirs, yours) in zip(
    train(apart, 3, make_batch=unpacked),
    train(together, 3, make_batch=unpacked),
    strict=True,
  ):
    far = tiny.distances(ours.model, theirs.model)
    assert max(far.values()) < 1e-6, far
    np.testing.assert_allclose(mine["loss"], yours["loss"], rtol=1e-6)
  start = tiny.distances(ours.model, tiny.random_model(MODEL))
  assert max(start.values()) > 1e-3  # It has gone somewhere.


@pytest.mark.parametrize("local", [SYNC, DELAYED], ids=["sync", "delayed"])
def test_what_crosses(local):
  leaves, tree, step, mesh = program(local)
  found = [op for op in collectives(step.as_text(), mesh) if "data" in op.axes]
  # Nothing that waits for the step's end may join the sum that it hides.
  weights = [op for op in found if op.in_branch]
  few = [op for op in found if not op.in_branch]
  num = sum(map(np.size, jax.tree.leaves(tree.unflatten(leaves).model)))
  # Once where replicas meet; the delayed form has the end of the run beside,
  # and in its other branch, an inner step alone, nothing.
  times = 1 + local.delay
  assert not any(op.in_loop for op in weights)
  assert {op.kind for op in weights} == {"all-reduce"}
  assert {s.dtype for op in weights for s in op.operands} == {"f32"}
  assert sum(op.num_elements for op in weights) == times * num
  # Two replicas: an all-reduce sends what it is given.
  assert sum(op.bytes_sent for op in weights) == times * 4 * num
  assert sum(op.num_elements for op in few) < 20


def saved(tmp_path, state) -> None:
  saver = checkpoint.Saver(tmp_path, keep=1, config={}, start_step=0)
  saver.save(int(state.step), state, {})
  saver.close()


def abstract(prepared):
  leaves, tree, step, _ = prepared
  return tree.unflatten(
    jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    for leaf, place in zip(leaves, step.input_shardings[0][0], strict=True)
  )


@pytest.mark.parametrize(
  ("local", "stop"),
  # In a round, where replicas met, and where they are about to.
  [(SYNC, 4), (SYNC, 3), (DELAYED, 3), (DELAYED, 5)],
)
def test_resumes_bit_by_bit(tmp_path, local, stop):
  prepared = program(local)
  states = [state for state, _ in train(prepared)]
  saved(tmp_path, states[stop - 1])
  restored = checkpoint.restore_latest(tmp_path, abstract(prepared)).state
  again = [state for state, _ in train(prepared, start=restored)]
  for a, b in zip(
    jax.tree.leaves(states[-1]), jax.tree.leaves(again[-1]), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  assert len(again) == NUM_STEPS - stop


def test_other_replicas_start_from_the_outer_weights(tmp_path, caplog):
  prepared = program(SYNC)
  *_, (state, _) = train(prepared, 4)
  saved(tmp_path, state)
  like = abstract_state(
    lambda rngs: tiny.random_model(MODEL),
    tiny.optimizer_of(ADAMW),
    mesh=make_mesh(MeshConfig(data=4, fsdp=2)),
    rules=Rules(),
    local=SYNC,
  )
  with caplog.at_level(logging.WARNING, logger="absl"):
    found = checkpoint.restore_latest(tmp_path, like).state
  assert "start from its outer weights" in caplog.text
  assert int(found.step) == 4
  for field in ("model", "opt_state"):
    for a, b in zip(
      jax.tree.leaves(getattr(found, field)),
      jax.tree.leaves(getattr(state, field)),
      strict=True,
    ):
      np.testing.assert_array_equal(a, b)
      assert np.abs(b).max() > 0
  for a, b in zip(
    jax.tree.leaves(found.replicas.model),
    jax.tree.leaves(state.model),
    strict=True,
  ):
    np.testing.assert_array_equal(a, np.broadcast_to(b, (4, *b.shape)))
  assert not any(map(np.any, jax.tree.leaves(found.replicas.opt_state)))


@pytest.mark.slow
def test_replicas_drop_different_elements():
  twice = tiny.packed_batch(0, rows=tiny.ROWS // 2)
  twice = {name: np.concatenate([x, x]) for name, x in twice.items()}
  for rate in (0.0, 0.2):
    model = dataclasses.replace(MODEL, residual_dropout=rate)
    ((state, _),) = train(
      program(SYNC, model=model), 1, make_batch=lambda step: twice
    )
    alike = [
      np.allclose(a[0], a[1], atol=1e-6)
      for a in jax.tree.leaves(state.replicas.model)
    ]
    assert all(alike) == (rate == 0.0), rate


@pytest.mark.parametrize(
  ("settings", "want"),
  [
    (dict(compression="int8"), "step.compression='none', got 'int8'"),
    (dict(zero_stage=2), "step.zero_stage=3, got 2"),
    (dict(offload=OffloadConfig(optimizer=True)), "step.offload="),
  ],
)
def test_settings_that_are_refused(settings, want):
  with pytest.raises(ValueError, match=want):
    StepConfig(local=SYNC, **settings)


@pytest.mark.parametrize(
  ("settings", "want"),
  [
    (dict(delay=1), "step.local.delay=1 .* wants step.local.steps"),
    (dict(outer_momentum=0.5), "it wants step.local.steps"),
    (dict(steps=0), "at least 1, or none"),
    (dict(steps=2, delay=2), "delay must be 0 or 1, got 2"),
    (dict(steps=2, outer_momentum=1.0), r"in \[0, 1\), got 1.0"),
    (dict(steps=2, outer_learning_rate=0.0), "must be positive, got 0.0"),
  ],
)
def test_local_settings_that_are_refused(settings, want):
  with pytest.raises(ValueError, match=want):
    LocalSGDConfig(**settings)


@pytest.mark.parametrize(
  ("mesh", "optimizer", "want"),
  [
    (MeshConfig(fsdp=4), ADAMW, "set mesh.data above 1"),
    (MeshConfig(pipeline=2, data=2, fsdp=1), ADAMW, "mesh.pipeline=2"),
    (TWO, OptimizerConfig(master_weights=True), "master_weights=False"),
    (
      TWO,
      OptimizerConfig(kind="onebit_adam", freeze_step=2, clip_norm=None),
      "set optimizer.kind=adamw",
    ),
  ],
)
def test_runs_that_are_refused(mesh, optimizer, want):
  with pytest.raises(ValueError, match=want):
    tiny.start(tiny.random_model(MODEL), optimizer, make_mesh(mesh), local=SYNC)
