"""What a mixture of experts adds to a training step.

The loss of a router is a mean over tokens, added to the mean loss. Its sums go
with those of the loss through micro-batches, meshes and stages, so each row of
a batch brings the factor ("router_weights") with which the one division at the
end makes that mean of it.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from model.moe import Stats
from sharding.stages import Layout
from train.layout import arrange

# Of the statistics, among the sums that an objective reports.
ROUTER = "router"


def has_experts(model: nnx.Module) -> bool:
  """Whether a model has experts."""
  config = getattr(model, "config", None)
  return config is not None and config.moe is not None


def with_router_weights(batch: dict, weight: jax.Array) -> dict:
  """The global batch with "router_weights", the same in each row.

  Args:
    batch: with "segment_ids", [B, T].
    weight: by which the loss of this batch will be divided.
  """
  ratio = weight / _num_tokens(batch)
  rows = jnp.full(batch["segment_ids"].shape[:1], ratio)
  return batch | {"router_weights": rows}


def batch_sums(stats: Stats, batch: dict) -> Stats:
  """The statistics with "loss", what joins the loss sum, in place of rows.

  Args:
    stats: of `Transformer.forward`.
    batch: the same rows, with "router_weights".
  """
  rows_B = batch["router_weights"] * stats["router_loss_B"]
  rest = {k: v for k, v in stats.items() if k != "router_loss_B"}
  return rest | {"loss": jnp.sum(rows_B)}


def metrics(
  stats: Stats, weight: jax.Array, batch: dict
) -> dict[str, jax.Array]:
  """What a run records of its routers, float32 scalars.

  router_loss, which was minimised beside the loss; router_balance (1: even)
  and router_z, means over tokens and layers, without their factors;
  router_load, the largest share of a layer's choices that one expert has,
  over the mean; router_dropped, the share of choices that were dropped.

  Args:
    stats: of `batch_sums`, of the global batch.
    weight: by which the loss is divided.
    batch: the global batch.
  """
  counts_LE = stats["expert_counts"]
  choices = jnp.maximum(jnp.sum(counts_LE), 1.0)
  tokens = counts_LE.shape[0] * _num_tokens(batch)
  return {
    "router_loss": stats["loss"] / weight,
    "router_balance": stats["balance"] / tokens,
    "router_z": stats["z"] / tokens,
    "router_load": jnp.max(counts_LE) * counts_LE.size / choices,
    "router_dropped": stats["dropped"] / choices,
  }


def rebalanced(
  model: nnx.Module, stats: Stats, layout: Layout | None = None
) -> nnx.Module:
  """The model with the biases of its routers moved by one step.

  An expert that had fewer tokens than the mean of its layer becomes likelier
  to be chosen: arXiv:2408.15664, algorithm 1.

  Args:
    model: after the optimizer's update, which leaves these biases alone: they
      have no gradient and do not decay.
    stats: of the global batch.
    layout: of the model's layers, on a mesh with a pipeline.
  """
  rate = model.config.moe.bias_rate
  if not rate:
    return model
  counts_LE = arrange(stats["expert_counts"], layout)
  mean_L1 = jnp.mean(counts_LE, axis=1, keepdims=True)
  # A copy: the module that was passed stays as it is.
  model = jax.tree.map(lambda x: x, model)
  bias = model.layers.moe.router.bias
  moved = bias[...] + rate * jnp.sign(mean_L1 - counts_LE)
  bias[...] = moved.astype(bias.dtype)
  return model


def _num_tokens(batch: dict) -> jax.Array:
  """Tokens that are no padding, at least 1."""
  real_BT = batch["segment_ids"] != 0
  return jnp.maximum(jnp.sum(real_BT, dtype=jnp.float32), 1.0)
