"""TRL's own preference losses on given log-probabilities. Needs torch.

The trainer's method is called on a stand-in for the trainer, with a model
that returns the log-probabilities: nothing is trained or downloaded.
"""

import collections
import types

import numpy as np
import torch
from trl import DPOTrainer

from tests.oracles import preference_cases


def losses(loss_type: str, beta: float, label_smoothing: float = 0.0) -> dict:
  """TRL's loss and metrics, pair by pair.

  Args:
    loss_type: as TRL calls it.
    beta: strength of the tie to the reference.
    label_smoothing: TRL honours it only for some losses.

  Returns:
    Lists over pairs: "loss", "reward_chosen", "reward_rejected",
    "reward_margin".
  """
  cases = preference_cases.inputs()
  result = collections.defaultdict(list)
  for mask, policy, reference in zip(
    cases["mask"], cases["policy"], cases["reference"], strict=True
  ):
    loss, metrics = _pair(
      mask, policy, reference, loss_type, beta, label_smoothing
    )
    result["loss"].append(loss)
    for ours, theirs in (
      ("reward_chosen", "rewards/chosen"),
      ("reward_rejected", "rewards/rejected"),
      ("reward_margin", "rewards/margins"),
    ):
      result[ours].append(metrics[theirs][0])
  return dict(result)


def _pair(mask, policy, reference, loss_type, beta, label_smoothing):
  """Loss and metrics of a batch of one pair."""
  log_probs = torch.from_numpy(np.ascontiguousarray(policy))
  outputs = types.SimpleNamespace(
    log_probs=log_probs,
    entropy=torch.zeros_like(log_probs),
    mean_logits=torch.zeros_like(log_probs),
    is_top1=torch.zeros(log_probs.shape, dtype=torch.bool),
  )
  gather = lambda x: x
  trainer = types.SimpleNamespace(
    model=types.SimpleNamespace(training=False),
    accelerator=types.SimpleNamespace(
      device="cpu", gather=gather, gather_for_metrics=gather
    ),
    aux_loss_enabled=False,
    ld_alpha=None,
    precompute_ref_logps=True,
    f_divergence_type="reverse_kl",
    loss_types=[loss_type],
    loss_weights=[1.0],
    beta=beta,
    label_smoothing=label_smoothing,
    use_weighting=False,
    _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    _total_train_tokens=0,
    _tp_size=1,
  )
  # The first token of a row is given: TRL shifts the mask by one.
  shifted = torch.from_numpy(np.pad(mask, [(0, 0), (1, 0)]).astype(np.int64))
  inputs = {
    "input_ids": torch.zeros_like(shifted),
    "attention_mask": torch.ones_like(shifted),
    "completion_mask": shifted,
    "ref_chosen_logps": torch.tensor(reference[:1]),
    "ref_rejected_logps": torch.tensor(reference[1:]),
  }
  loss = DPOTrainer._compute_loss(
    trainer, lambda **_: outputs, inputs, return_outputs=False
  )
  return loss.item(), trainer._metrics["eval"]
