"""How a model is trained: the settings that all training loops share.

Imports no JAX: dtypes and choices are strings. Each default names its source.
"""

import dataclasses
from typing import Literal

# Learning rates of the articles that this code base follows, "The lifecycle
# of a large model", table of SFT settings and its interview answers:
# pretraining about 2e-4, SFT about 2e-5 (10 to 100 times smaller).
PRETRAINING_LEARNING_RATE = 2e-4
SFT_LEARNING_RATE = 2e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
  """Learning rate as a function of the step.

  Attributes:
    kind: after warm-up, "constant"; "linear" or "cosine" (arXiv:1608.03983)
      down to `final_ratio` of the peak at the last step; "wsd": constant, then
      linear down in the last `decay_fraction` (arXiv:2404.06395; linear as in
      arXiv:2405.18392).
    peak: the highest learning rate.
    warmup_steps: steps of linear warm-up; None: use `warmup_fraction`.
    warmup_fraction: the same as a part of all steps.
    final_ratio: last learning rate over the peak (0.1: arXiv:2203.15556).
    decay_fraction: part of all steps in which "wsd" decays.
  """

  kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
  peak: float = PRETRAINING_LEARNING_RATE
  warmup_steps: int | None = None
  warmup_fraction: float = 0.02
  final_ratio: float = 0.1
  decay_fraction: float = 0.2

  def __post_init__(self):
    if self.peak <= 0:
      raise ValueError(f"schedule.peak must be positive, got {self.peak}")
    if self.warmup_steps is not None and self.warmup_steps < 0:
      raise ValueError(
        f"schedule.warmup_steps must not be negative, got {self.warmup_steps}"
      )
    for name in ("warmup_fraction", "final_ratio", "decay_fraction"):
      if not 0.0 <= getattr(self, name) <= 1.0:
        raise ValueError(
          f"schedule.{name} must be in [0, 1], got {getattr(self, name)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """How gradients become updates.

  Attributes:
    kind: "adamw" (arXiv:1711.05101), "sgd", or "onebit_adam"
      (arXiv:2102.02888): AdamW for `freeze_step` steps, then with the variance
      that it has by then, so that replicas may exchange the signs of momenta
      (`step.compression`).
    b1: decay of AdamW's first moment (0.9, 0.95: arXiv:2005.14165, app. B).
    b2: decay of AdamW's second moment. "onebit_adam" wants a long memory,
      0.999 as in its paper: what its last steps did not see stays small.
    eps: added to the root of the second moment.
    momentum: of SGD (v = momentum v + g); 0: none.
    weight_decay: decoupled: w -= learning_rate * weight_decay * w. Norms and
      biases are not decayed (see `train.optimizers.decayed`).
    clip_norm: gradients of a larger global norm are scaled down to it
      (arXiv:1211.5063); None: never.
    master_weights: the model and gradients are bfloat16, and the optimizer
      state has float32 weights beside its moments (arXiv:1710.03740): 2 + 2 +
      12 bytes a parameter in place of 4 + 4 + 8. Micro-batches add up in
      bfloat16.
    freeze_step: of 1-bit Adam; 15 to 25 % of all steps in arXiv:2102.02888.
  """

  kind: Literal["adamw", "sgd", "onebit_adam"] = "adamw"
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  momentum: float = 0.0
  weight_decay: float = 0.1
  clip_norm: float | None = 1.0
  master_weights: bool = False
  freeze_step: int | None = None

  def __post_init__(self):
    for name in ("b1", "b2", "momentum"):
      if not 0.0 <= getattr(self, name) < 1.0:
        raise ValueError(
          f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}"
        )
    if self.eps <= 0:
      raise ValueError(f"optimizer.eps must be positive, got {self.eps}")
    if self.weight_decay < 0:
      raise ValueError(
        f"optimizer.weight_decay must not be negative, got {self.weight_decay}"
      )
    if self.clip_norm is not None and self.clip_norm <= 0:
      raise ValueError(
        "optimizer.clip_norm must be positive, or None for no clipping; got"
        f" {self.clip_norm}"
      )
    if (self.kind == "onebit_adam") != (self.freeze_step is not None):
      raise ValueError(
        "optimizer.freeze_step is for optimizer.kind=onebit_adam, and needed"
        f" there; got kind={self.kind!r}, freeze_step={self.freeze_step}"
      )
    if self.freeze_step is not None:
      if self.freeze_step < 1:
        raise ValueError(
          "optimizer.freeze_step must be at least 1: before it there is no"
          f" variance; got {self.freeze_step}"
        )
      if self.clip_norm is not None:
        raise ValueError(
          "optimizer.kind=onebit_adam needs optimizer.clip_norm=none: no"
          " replica knows the norm of a gradient of which only signs cross"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadConfig:
  """What stands in host memory and comes to the device a layer at a time.

  Of layers: embeddings, the last norm and the head stay on the device.

  Attributes:
    optimizer: the optimizer state.
    gradients: what micro-batches add up to.
    parameters: the weights; it asks for `gradients`.
    activations: what `step.remat` keeps for the backward pass, with "block"
      or "dots".
    host_update: the host's cores compute the update; it asks for `optimizer`.
  """

  optimizer: bool = False
  gradients: bool = False
  parameters: bool = False
  activations: bool = False
  host_update: bool = False

  def __post_init__(self):
    for name, other in dict(
      parameters="gradients", host_update="optimizer"
    ).items():
      if getattr(self, name) and not getattr(self, other):
        raise ValueError(
          f"step.offload.{name}=True wants step.offload.{other}=True, got False"
        )

  @property
  def of_state(self) -> bool:
    """Whether an update reads host memory."""
    return self.optimizer or self.gradients or self.parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGDConfig:
  """Replicas of the weights that train apart and meet now and then (DiLoCo).

  The replicas are those of `mesh.data`; `train/local_sgd.py` has the
  equations. Evaluation, checkpoints of `model` and exports are of the outer
  weights, which change where replicas meet.

  Attributes:
    steps: inner steps between two meetings (500 in arXiv:2311.08105); None:
      replicas add up the gradients of every step.
    outer_learning_rate: of the SGD that moves the outer weights (0.7:
      arXiv:2311.08105, section 4).
    outer_momentum: of the same, in Nesterov's form; 0: none.
    delay: inner steps that hide the exchange: 0, replicas wait for it; 1, they
      take one step meanwhile (arXiv:2501.18512).
  """

  steps: int | None = None
  outer_learning_rate: float = 0.7
  outer_momentum: float = 0.9
  delay: Literal[0, 1] = 0

  def __post_init__(self):
    if self.steps is None:
      for field in dataclasses.fields(self):
        if getattr(self, field.name) != field.default:
          raise ValueError(
            f"step.local.{field.name}={getattr(self, field.name)} says how"
            " replicas meet that train apart: it wants step.local.steps, got"
            " none"
          )
      return
    if self.steps < 1:
      raise ValueError(
        "step.local.steps must be at least 1, or none for replicas that add up"
        f" every gradient; got {self.steps}"
      )
    if self.outer_learning_rate <= 0:
      raise ValueError(
        "step.local.outer_learning_rate must be positive, got"
        f" {self.outer_learning_rate}"
      )
    if not 0.0 <= self.outer_momentum < 1.0:
      raise ValueError(
        "step.local.outer_momentum must be in [0, 1), got"
        f" {self.outer_momentum}"
      )
    if self.delay not in (0, 1):
      raise ValueError(f"step.local.delay must be 0 or 1, got {self.delay}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
  """How one step is computed; but for `compression` and `local`, not what.

  Attributes:
    precision: a policy of `model.precision`; "auto" by platform.
    attention: implementation of attention; "auto" by platform.
    loss: implementation of the head's cross-entropy; "auto" by platform.
    context: how devices that share a sequence (mesh.context) attend: "ring"
      passes keys on, "all_gather" gathers them, "ulysses" exchanges heads.
    remat: what the backward pass computes again, see `model.execution`.
    remat_every: layers between two kept inputs, for remat="block".
    unroll: layers per iteration of the compiled loop.
    accumulation: micro-batches a step.
    loss_chunk: tokens per device whose logits exist at a time.
    zero_stage: what is split over `mesh.fsdp`: 1, the optimizer state; 2, and
      gradients; 3, and parameters (arXiv:1910.02054).
    compression: how gradients cross the slow links between replicas of the
      weights (`mesh.data`): "int8", a quarter of float32's bytes, right in
      expectation; "largest", a fifth, the largest entries now and the others
      later; "signs", a thirtieth, of 1-bit Adam alone. It changes what is
      computed, a little.
    whole_steps: first steps whose gradients cross as float32 all the same, for
      compression="int8" or "largest"; "signs" waits for
      `optimizer.freeze_step`. A fifth of a run that starts from nothing
      (docs/log.md); arXiv:1712.01887, section 3.3, warms up for the same
      reason.
    local: whether these replicas train apart, and meet once in many steps.
    schedule: of the micro-batches on a mesh with a pipeline, see
      `sharding/schedules.py`.
    virtual_stages: chunks of layers a stage, for schedule="interleaved".
    offload: what stands in host memory.
  """

  precision: str = "auto"
  attention: str = "auto"
  loss: str = "auto"
  context: Literal["ring", "all_gather", "ulysses"] = "ring"
  remat: Literal["none", "dots", "block", "nested"] = "none"
  remat_every: int = 1
  unroll: int = 1
  accumulation: int = 1
  loss_chunk: int = 1024
  zero_stage: Literal[1, 2, 3] = 3
  compression: Literal["none", "int8", "largest", "signs"] = "none"
  whole_steps: int = 0
  local: LocalSGDConfig = LocalSGDConfig()
  schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
  virtual_stages: int = 1
  offload: OffloadConfig = OffloadConfig()

  def __post_init__(self):
    if self.zero_stage not in (1, 2, 3):
      raise ValueError(
        f"step.zero_stage must be 1, 2 or 3, got {self.zero_stage}"
      )
    if self.offload.parameters and self.zero_stage < 3:
      raise ValueError(
        "step.offload.parameters=True wants step.zero_stage=3, got"
        f" {self.zero_stage}"
      )
    if self.offload.of_state and self.compression != "none":
      raise ValueError(
        "step.offload moves gradients and states as they are: wanted"
        f" step.compression=none beside it, got {self.compression!r}"
      )
    if self.local.steps is not None:
      wanted = StepConfig(remat=self.remat)
      for name, why in dict(
        compression="what crosses is the sum of many steps, as float32",
        zero_stage="replicas hold weights like their optimizer state",
        offload="replicas keep their states on their devices",
      ).items():
        if getattr(self, name) != getattr(wanted, name):
          raise ValueError(
            f"step.local.steps={self.local.steps}: {why}. Wanted"
            f" step.{name}={getattr(wanted, name)!r}, got"
            f" {getattr(self, name)!r}"
          )
    if self.offload.activations and self.remat not in ("block", "dots"):
      raise ValueError(
        "step.offload.activations=True moves what step.remat='block' or 'dots'"
        f" keeps; got step.remat={self.remat!r}"
      )
    if self.whole_steps < 0 or (
      self.whole_steps and self.compression not in ("int8", "largest")
    ):
      raise ValueError(
        "step.whole_steps must be 0 or, with step.compression='int8' or"
        f" 'largest', more; got {self.whole_steps} with {self.compression!r}"
      )
    for name in (
      "remat_every",
      "unroll",
      "accumulation",
      "loss_chunk",
      "virtual_stages",
    ):
      if getattr(self, name) < 1:
        raise ValueError(
          f"step.{name} must be at least 1, got {getattr(self, name)}"
        )
    if (self.schedule == "interleaved") != (self.virtual_stages > 1):
      raise ValueError(
        "step.schedule='interleaved' and step.virtual_stages > 1 go together;"
        f" got {self.schedule!r} and {self.virtual_stages}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
  """When to save, and how many to keep.

  Attributes:
    every: steps between two checkpoints; the last step is always saved.
    keep: newest checkpoints that stay on disk.
  """

  every: int = 500
  keep: int = 3

  def __post_init__(self):
    for name in ("every", "keep"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"checkpoint.{name} must be at least 1, got {getattr(self, name)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorConfig:
  """What a run writes down.

  Attributes:
    log_every: steps between two lines of metrics.jsonl.
    eval_every: steps between two evaluations on held-out text.
    tensorboard: also write TensorBoard events.
  """

  log_every: int = 10
  eval_every: int = 200
  tensorboard: bool = True

  def __post_init__(self):
    for name in ("log_every", "eval_every"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"monitor.{name} must be at least 1, got {getattr(self, name)}"
        )
