"""Runs equal layers one after another, with a bound on kept activations."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from model import linear
from model.execution import Execution
from pallas_kernels.flash_attention import attend

# What "dots" keeps.
_SAVED = linear.SAVED_NAME, attend.SAVED_NAME


def scan_layers(step, carry, layers, num_layers: int, execution: Execution):
  """`jax.lax.scan` of `step` over layers under the rematerialisation policy.

  Args:
    step: (carry, layer) -> (carry, what to collect).
    carry: the residual stream and what travels with it.
    layers: tree of arrays [L, ...].
    num_layers: L.
    execution: `remat`, `remat_every` and `unroll`.

  Returns:
    The last carry, and what was collected, stacked to [L, ...].

  Raises:
    ValueError: `remat_every` does not divide L.
  """
  remat = execution.remat

  def run(step, carry, layers):
    return jax.lax.scan(step, carry, layers, unroll=execution.unroll)

  # Inside a scan nothing can be shared with the forward pass by mistake.
  checkpoint = lambda f, **kw: jax.checkpoint(f, prevent_cse=False, **kw)
  if execution.offload_activations:
    return run(_offloaded(step, execution, checkpoint), carry, layers)
  if remat == "none":
    return run(step, carry, layers)
  if remat == "dots":
    names = jax.checkpoint_policies.save_only_these_names(*_SAVED)
    return run(checkpoint(step, policy=names), carry, layers)
  if remat == "block" and execution.remat_every == 1:
    return run(checkpoint(step), carry, layers)
  if remat == "block":
    every, inner = execution.remat_every, step
  elif remat == "nested":
    every, inner = near_root(num_layers), checkpoint(step)
  else:
    raise ValueError(
      f"remat must be 'none', 'dots', 'block' or 'nested', got {remat!r}"
    )
  if num_layers % every:
    raise ValueError(
      f"remat_every={every} must divide the {num_layers} layers of the model"
    )
  # Dims of size 1 go elsewhere in the layout of a reshape, and XLA would copy
  # the weights of a single key head to put them back: they stay out of it.
  shapes = jax.tree.map(lambda x: x.shape[1:], layers)
  group = lambda x: x.reshape(-1, every, *(n for n in x.shape[1:] if n > 1))
  whole = lambda carry, layer: inner(
    carry, jax.tree.map(jnp.reshape, layer, shapes)
  )
  outer = checkpoint(lambda carry, layers: run(whole, carry, layers))
  carry, collected = run(outer, carry, jax.tree.map(group, layers))
  flat = lambda x: x.reshape(num_layers, *x.shape[2:])
  return carry, jax.tree.map(flat, collected)


def _offloaded(step, execution: Execution, checkpoint: Callable) -> Callable:
  """A checkpointed step whose kept activations wait in host memory.

  Raises:
    ValueError: what is kept has no name to move it by.
  """
  if execution.remat_every > 1 or execution.remat not in ("block", "dots"):
    raise ValueError(
      "offload_activations wants remat='block' with remat_every=1, or"
      f" remat='dots'; got remat={execution.remat!r}, remat_every="
      f"{execution.remat_every}"
    )
  kept = _SAVED if execution.remat == "dots" else ("layer_input",)

  def named(carry, layer):
    if execution.remat == "block":
      carry = jax.tree.map(lambda x: checkpoint_name(x, *kept), carry)
    return step(carry, layer)

  policy = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=kept,
    offload_src="device",
    offload_dst="pinned_host",
  )
  return checkpoint(named, policy=policy)


def near_root(n: int) -> int:
  """The divisor of n nearest to its square root."""
  divisors = [d for d in range(1, n + 1) if n % d == 0]
  return min(divisors, key=lambda d: abs(math.log(d) - math.log(n) / 2))
