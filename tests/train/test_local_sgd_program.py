"""A delayed meeting on a TPU: does the step that hides it run meanwhile?"""

import re

import jax
import numpy as np
import pytest

from pallas_kernels.aot import topology_devices
from sharding.axes import MeshConfig
from sharding.mesh import make_mesh
from tests.train import programs
from tests.train.test_tpu_program import CONFIG, ROWS
from train.config import LocalSGDConfig

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]


def compiled(local: LocalSGDConfig):
  """The step on two slices of v5e:2x2; its weights, and its computations.

  What slices say to each other are pairs of `send` and `recv` with their ends.
  """
  devices = topology_devices("v5e:2x2", num_slices=2)
  mesh = make_mesh(MeshConfig(data=2, fsdp=4), devices=devices)
  made = programs.make(
    CONFIG, mesh, ROWS, precision="bf16", remat="block", local=local
  )
  text = made.lower().compile().as_text()
  computations = re.split(r"\n(?=\S)", text)
  num = sum(leaf.size for leaf in jax.tree.leaves(made.abstract.model))
  return num, [text.splitlines() for text in computations]


def places(lines: list[str], opcode: str) -> list[int]:
  """Where an opcode stands in a scheduled computation."""
  return [i for i, x in enumerate(lines) if re.search(rf" {opcode}\(", x)]


def floats_sent(lines: list[str]) -> int:
  shapes = (
    re.search(r"= \(f32\[([\d,]+)\]", lines[i]) for i in places(lines, "send")
  )
  return sum(np.prod([int(n) for n in s[1].split(",")]) for s in shapes)


def test_the_sum_crosses_while_the_next_step_runs():
  num, computations = compiled(LocalSGDConfig(steps=10, delay=1))
  sending = [lines for lines in computations if places(lines, "send")]
  # Weights in the one branch, scalars outside.
  scalars, weights = sorted(sending, key=floats_sent)
  assert floats_sent(scalars) < 1e4
  # fsdp=4; the rest fills tiles.
  assert num / 4 <= floats_sent(weights) < 1.1 * num / 4
  assert not places(scalars, "while")
  # Forward and backward are loops over layers.
  loops = places(weights, "while")
  assert len(loops) >= 2
  for start in ("send", "recv"):
    assert max(places(weights, start)) < min(loops)
    assert min(places(weights, f"{start}-done")) > max(loops)


def test_without_delay_nothing_runs_meanwhile():
  """So the test above can fail."""
  num, computations = compiled(LocalSGDConfig(steps=10))
  *_, weights = sorted(
    (lines for lines in computations if places(lines, "send")),
    key=floats_sent,
  )
  assert floats_sent(weights) >= num / 4
  assert not places(weights, "while")
