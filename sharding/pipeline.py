"""Runs a pipeline schedule: one program in which each stage does its own part.

The region is manual over the mesh axis of the stages (and over those that
replicate the weights) and leaves all others to XLA. A scan walks over the ticks
of the table; in each a stage takes the branches that the table names and two
permutations, the same on all stages, carry activations on and gradients back.
Collectives inside of a branch stay within the stage that takes it.

What a stage computes comes in as functions (`Parts`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.buffers import plan
from sharding.pipeline_actions import Parts, Recomputed, Stashed, Sums
from sharding.regions import current_mesh, manual_axes
from sharding.schedules import BACKWARD, Schedule

Tree = Any


def run(
  schedule: Schedule,
  parts: Parts,
  chunks: Tree,
  ends: Tree,
  micro_batches: Tree,
  *,
  mesh: Mesh,
  axis: str,
  replicas: Sequence[str] = (),
  places: tuple[Tree, Tree] | None = None,
) -> Sums:
  """Takes all micro-batches through all stages; to be called under `jax.jit`.

  Args:
    schedule: who does what when.
    parts: what the stages compute.
    chunks: weights of the layers, arrays [P V depth, ...] in the order (stage,
      chunk, layer), split over `axis`.
    ends: weights for `parts.first` and `parts.last`, whole on every stage.
    micro_batches: arrays [M, replicas, ...].
    mesh: the devices.
    axis: the mesh axis of the stages.
    replicas: mesh axes that split the second dim of `micro_batches`, and no
      gradient: these cross them once, at the end.
    places: of the gradients of chunks and of ends, where they are added up.

  Returns:
    Sums over micro-batches; gradients where the schedule has backward actions.
  """
  assert mesh.shape[axis] == schedule.num_stages, (mesh.shape, schedule.name)
  P, everywhere = PartitionSpec, PartitionSpec()
  here = P(axis)
  backward = BACKWARD in schedule.actions

  def region(chunks, ends, micro_batches):
    sums = _walk(
      schedule,
      parts,
      jax.tree.map(
        lambda w: w.reshape(schedule.num_chunks, -1, *w.shape[1:]), chunks
      ),
      ends,
      jax.tree.map(lambda x: x[:, 0], micro_batches),
      axis,
      places and _places_here(places, mesh),
    )
    add = lambda axes: lambda x: lax.psum(x, axes) if axes else x
    add_all, add_replicas = add((axis, *replicas)), add(tuple(replicas))
    flat = lambda g: add_replicas(g).reshape(-1, *g.shape[2:])
    return Sums(
      loss=add_all(sums.loss),
      aux=jax.tree.map(add_all, sums.aux),
      chunks=jax.tree.map(flat, sums.chunks),
      ends=jax.tree.map(add_all, sums.ends),
    )

  mapped = jax.shard_map(
    region,
    mesh=current_mesh(mesh),
    in_specs=(here, everywhere, P(None, tuple(replicas) or None)),
    out_specs=Sums(
      loss=everywhere,
      aux=everywhere,
      chunks=here if backward else None,
      ends=everywhere if backward else None,
    ),
    axis_names={axis, *replicas},
    check_vma=False,
  )
  return mapped(chunks, ends, micro_batches)


def _places_here(places: tuple[Tree, Tree], mesh: Mesh) -> tuple[Tree, Tree]:
  """The same for one stage, by the axes that are left to XLA.

  Layers of a stage have a dim of chunks before their own.
  """
  manual = manual_axes()

  def here(entries):
    kept = []
    for entry in entries:
      axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
      kept.append(tuple(a for a in axes if a not in manual) or None)
    return NamedSharding(current_mesh(mesh), PartitionSpec(*kept))

  chunks, ends = places
  return (
    jax.tree.map(lambda p: here([None, *p.spec]), chunks),
    jax.tree.map(lambda p: here(p.spec), ends),
  )


def _walk(
  schedule: Schedule,
  parts: Parts,
  chunks: Tree,
  ends: Tree,
  micro_batches: Tree,
  axis: str,
  places: tuple[Tree, Tree] | None,
) -> Sums:
  """One stage's walk over the ticks; see `run`."""
  P, V = schedule.num_stages, schedule.num_chunks
  planned = plan(schedule)
  kind = Stashed if schedule.split else Recomputed
  actions = kind(schedule, parts, chunks, ends, micro_batches)
  stage = lax.axis_index(axis)
  # In a ring the last stage sends to the next chunk of the first one.
  onward = [(s, (s + 1) % P) for s in range(P if V > 1 else P - 1)]
  back = [(to, s) for s, to in onward]

  def tick(carry, row):
    x, dx, state = carry
    row = {name: column[stage] for name, column in row.items()}
    row["stage"] = stage
    state = state.store("inputs", row["inputs_arrives"], x)
    y, state = actions.forward(state, row)
    x = lax.ppermute(y, axis, onward)
    if BACKWARD in schedule.actions:
      state = state.store("gradients", row["gradients_arrives"], dx)
      dx, state = actions.backward(state, row)
      dx = lax.ppermute(dx, axis, back)
      state = actions.weight(state, row)
    return (x, dx, state), None

  nothing = actions.nothing
  state = actions.start(planned.sizes)
  if places is not None:
    gradients = lax.with_sharding_constraint(
      (state.sums.chunks, state.sums.ends), places
    )
    state = state.with_sums(Sums(state.sums.loss, state.sums.aux, *gradients))
  start = nothing, nothing, state
  rows = jax.tree.map(jnp.asarray, planned.rows)
  (_, _, state), _ = lax.scan(tick, start, rows)
  return state.sums
