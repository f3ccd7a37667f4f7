"""The gradient of a step on a mesh with a pipeline, from the executor.

Stage 0 embeds, every stage runs its layers, the last one normalises and has the
objective. What stands at the ends (embedding, final norm, head) is whole on
every stage, which keeps tied weights one array: its gradient is the sum of what
both ends contribute.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from model.execution import Execution
from sharding import schedules
from sharding.pipeline import Parts, run
from sharding.rules import without_axes
from sharding.schedules import Schedule
from sharding.stages import Layout
from train import experts
from train.objective import Batch, Metrics, Objective

Model = TypeVar("Model", bound=nnx.Module)
AXIS = "pipeline"


@dataclasses.dataclass(frozen=True)
class Stages:
  """What a mesh's stages do in a step.

  Attributes:
    schedule: who takes which micro-batch when.
    layout: which layers are whose.
  """

  schedule: Schedule
  layout: Layout

  def sums(
    self,
    objective: Objective,
    model: Model,
    micro_batches: Batch,
    key: jax.Array | None,
    execution: Execution,
    replicas: tuple[str, ...] = (),
    places: Model | None = None,
  ) -> tuple[jax.Array, Metrics, Model | None]:
    """Takes all micro-batches through the pipeline.

    Args:
      objective: what to minimise.
      model: the weights, its layers in the order of the layout.
      micro_batches: arrays [micro-batches, replicas, rows, ...].
      key: of dropout; None: evaluation.
      execution: how the model runs.
      replicas: mesh axes that split the second dim of the batch, and no
        gradient.
      places: of the gradients while they are added up.

    Returns:
      The loss sum, the sums to report (as those of `Objective`, but with the
      router's of `experts.batch_sums`), and the gradient of what is minimised,
      if the schedule has backward actions.
    """
    rules = without_axes(execution.rules, (AXIS, *replicas))
    execution = dataclasses.replace(execution, rules=rules)
    ends, layers = _without_layers(model), model.layers
    if key is not None:
      shape = micro_batches["row_ids"].shape
      keys = jnp.broadcast_to(jax.random.key_data(key), (*shape, 2))
      micro_batches = micro_batches | {"key": keys}
    sums = run(
      self.schedule,
      _parts(objective, ends, self.layout, execution),
      layers,
      ends,
      micro_batches,
      mesh=execution.mesh,
      axis=AXIS,
      replicas=replicas,
      places=places and (places.layers, _without_layers(places)),
    )
    grads = None
    if sums.ends is not None:
      grads = _with_layers(sums.ends, sums.chunks)
    # `sums.loss` is what was minimised, with the loss of routers.
    aux = dict(sums.aux["aux"])
    if experts.ROUTER in sums.aux:
      aux[experts.ROUTER] = sums.aux[experts.ROUTER]
    return sums.aux["loss"], aux, grads


def make_stages(
  schedule: str, layout: Layout | None, mesh: Mesh, num_micro: int
) -> Stages | None:
  """Puts a schedule and a layout together; None on a mesh without a pipeline.

  Args:
    schedule: as in `step.schedule`, or "evaluation".
    layout: of the state's layers.
    mesh: what it is for.
    num_micro: micro-batches of a step.

  Raises:
    ValueError: layout and mesh do not fit, or the schedule takes no such
      number of micro-batches.
  """
  P = mesh.shape[AXIS]
  if (layout.num_stages if layout else 1) != P:
    raise ValueError(
      f"wanted a layout of the layers for the mesh, of mesh.pipeline={P}"
      f" stages (train.layout.make_layout), got {layout}"
    )
  if layout is None:
    return None
  V = layout.num_chunks
  match schedule:
    case "gpipe":
      table = schedules.gpipe(P, num_micro)
    case "1f1b":
      table = schedules.one_forward_one_backward(P, num_micro)
    case "interleaved":
      table = schedules.interleaved(P, num_micro, V)
    case "zero_bubble":
      table = schedules.zero_bubble(P, num_micro)
    case "evaluation":
      table = schedules.evaluation(P, num_micro, V)
    case _:
      raise ValueError(
        "step.schedule must be 'gpipe', '1f1b', 'interleaved' or"
        f" 'zero_bubble', got {schedule!r}"
      )
  assert table.num_chunks == V, (schedule, layout)
  return Stages(table, layout)


def describe(stages: Stages, balance: float) -> str:
  """A line on what the pipeline of a run costs.

  Args:
    stages: of the step.
    balance: from `train.layout.imbalance`.
  """
  # Forward runs twice, and backward is twice as much.
  costs = schedules.Costs(forward=1, backward=2, weight=1)
  counts = stages.layout.counts
  return (
    f"Pipeline: layers {' '.join(map(str, counts))} on"
    f" {stages.layout.num_stages} stages; largest over mean cost of a"
    f" {'chunk' if stages.layout.num_chunks > 1 else 'stage'} {balance:.2f};"
    f" {stages.schedule.name} with {stages.schedule.num_micro} micro-batches"
    f" waits {schedules.bubble(stages.schedule, costs):.1%} of the time"
  )


def most_micro_batches(num_examples: int, layout: Layout) -> int:
  """How many micro-batches an evaluation makes of a device's examples.

  As many as divide them, up to four a stage: the bubble is then a fifth.
  """
  most = min(num_examples, 4 * layout.num_stages)
  return max(n for n in range(1, most + 1) if num_examples % n == 0)


def _parts(
  objective: Objective, model: Model, layout: Layout, execution: Execution
) -> Parts:
  """A model's forward pass and loss, as the executor wants them."""
  numbers = jnp.asarray(layout.numbers)

  def view(batch):
    return model.view(batch["tokens"], batch["positions"], batch["segment_ids"])

  def dropout_keys(batch):
    if "key" not in batch:
      return None
    key = jax.random.wrap_key_data(batch["key"][0], impl="threefry2x32")
    return objective.dropout_keys(batch, key)

  def first(ends, batch):
    keys = dropout_keys(batch)
    return ends.embedded(batch["tokens"], view(batch), keys, execution)

  def layers(chunk, x_BTD, batch, v):
    x, _, stats = model.run_layers(
      chunk,
      x_BTD,
      view(batch),
      numbers=numbers[v],
      some_empty=not layout.is_even,
      dropout_keys=dropout_keys(batch),
      execution=execution,
    )
    if "router_weights" not in batch:
      return x, jnp.zeros((), jnp.float32), {}
    stats = experts.batch_sums(stats, batch)
    return x, stats["loss"], {experts.ROUTER: stats}

  def last(ends, x_BTD, batch):
    loss, aux = objective.loss(ends, ends.normed(x_BTD), batch, execution)
    return loss, {"loss": loss, "aux": aux}

  return Parts(first=first, layers=layers, last=last)


def _without_layers(model: Any) -> Any:
  """The same model, but for its layers."""
  rest = nnx.merge(*nnx.split(model))
  del rest.layers
  return rest


def _with_layers(rest: Any, layers: Any) -> Any:
  """Undoes `_without_layers`."""
  model = nnx.merge(*nnx.split(rest))
  model.layers = layers
  return model
