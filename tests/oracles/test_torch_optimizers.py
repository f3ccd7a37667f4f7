"""AdamW and SGD against `torch.optim`, with clipping, over several steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import tolerance
from train.config import OptimizerConfig, ScheduleConfig
from train.optimizers import make_optimizer
from train.schedules import make_schedule

pytestmark = pytest.mark.oracle

RATE = 1e-2


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize(
  "config",
  [
    OptimizerConfig(),
    OptimizerConfig(b1=0.8, b2=0.999, eps=1e-4, weight_decay=0.3),
    OptimizerConfig(kind="sgd", momentum=0.9, weight_decay=0.0),
  ],
)
def test_torch(config, clip_norm):
  import torch

  config = dataclasses.replace(config, clip_norm=clip_norm)
  rng = np.random.default_rng(0)
  draw = lambda: {
    "w": rng.normal(size=(5, 7)).astype(np.float32),
    "b": rng.normal(size=7).astype(np.float32),
  }
  start = draw()
  theirs = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in start.items()}
  if config.kind == "adamw":
    groups = [
      {"params": [theirs["w"]], "weight_decay": config.weight_decay},
      {"params": [theirs["b"]], "weight_decay": 0.0},
    ]
    betas = (config.b1, config.b2)
    torch_rule = torch.optim.AdamW(groups, lr=RATE, betas=betas, eps=config.eps)
  else:
    torch_rule = torch.optim.SGD(
      theirs.values(), lr=RATE, momentum=config.momentum
    )

  schedule = ScheduleConfig(kind="constant", peak=RATE, warmup_steps=0)
  rule = make_optimizer(config, make_schedule(schedule, 10))
  ours = jax.tree.map(jnp.asarray, start)
  state = rule.start(ours)[1]
  for step in range(6):
    grads = draw()
    for k, value in theirs.items():
      value.grad = torch.tensor(grads[k])
    if clip_norm is not None:
      torch.nn.utils.clip_grad_norm_(theirs.values(), clip_norm)
    torch_rule.step()
    ours, state, _ = rule.update(
      jax.tree.map(jnp.asarray, grads), state, ours, jnp.int32(step)
    )
  for k, value in theirs.items():
    np.testing.assert_allclose(
      ours[k], value.detach().numpy(), **tolerance("matmul"), err_msg=k
    )
