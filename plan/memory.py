"""Bytes of a device in a step, by part; nothing is compiled.

  python -m plan.memory --config=configs/smollm2_135m.py:v5e-8 \
    --topology=v5e:2x4 [--loop=pretrain|dpo|ppo|generate] [--json=FILE]

The state is the loop's own, activations are those that autodiff keeps of the
model (`plan/held.py`, `plan/activations.py`).
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

from configs import cli
from plan.chips import Topology, parse
from train.config import LocalSGDConfig, OffloadConfig, OptimizerConfig
from train.run_config import PretrainConfig

LOOPS = ("pretrain", "dpo", "ppo", "generate")
GIB = 2**30
_POLICIES = ("none", "dots", "block", "nested")
# Fields of a batch, four bytes a token each.
_BATCH_FIELDS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """Bytes of one device.

  Attributes:
    parts: name -> bytes.
    phases: name -> the parts that live at that time.
    host: bytes in the memory of the device's host.
  """

  parts: dict[str, int]
  phases: dict[str, tuple[str, ...]]
  host: int = 0

  @property
  def by_phase(self) -> dict[str, int]:
    """What lives in each phase."""
    return {
      phase: sum(self.parts.get(name, 0) for name in names)
      for phase, names in self.phases.items()
    }

  @property
  def peak_phase(self) -> str:
    """The phase that needs most."""
    return max(self.by_phase, key=self.by_phase.__getitem__)

  @property
  def peak(self) -> int:
    """What a device must have."""
    return self.by_phase[self.peak_phase]


BETWEEN_STEPS = (
  "parameters",
  "optimizer state",
  "owed to compressed sums",
  "replicas that train apart",
  "batch",
)


def training(
  config: PretrainConfig, num_devices: int, platform: str
) -> Estimate:
  """Memory of a training step.

  Three moments may need most: when the loss has the logits of a chunk beside
  all activations, when the backward pass has a layer at work beside all
  activations and gradients, and the update.

  Args:
    config: the run.
    num_devices: of the machine.
    platform: "tpu", "gpu" or "cpu".

  Raises:
    ValueError: what the training loop would refuse, too.
  """
  import jax.numpy as jnp

  from model.precision import resolve
  from model.stack import near_root
  from plan import activations, held
  from plan.traffic import products_back
  from sharding import buffers
  from sharding.arrays import check_batch_size
  from train.pipeline import make_stages

  model, step, rules = config.model, config.step, config.rules
  offload, data = step.offload, config.data
  here = held.hold(config, num_devices)
  mesh, state, layout = here.mesh, here.state, here.layout
  check_batch_size(
    data.global_batch_size, mesh, rules, accumulation=step.accumulation
  )
  stages = make_stages(step.schedule, layout, mesh, step.accumulation)

  # ---- What stands there between two steps ----
  parts, host = {}, 0
  for name, tree, offloaded in (
    ("parameters", state.model, offload.parameters),
    ("optimizer state", state.opt_state, offload.optimizer),
    ("gradients", held.gradients(here, step), offload.gradients),
    ("owed to compressed sums", state.residual, False),
    ("replicas that train apart", state.replicas, False),
  ):
    parts[name], there = held.device_bytes(tree, offloaded=offloaded)
    host += there
  share = activations.share(
    model,
    mesh.shape,
    rules,
    seq_len=data.seq_len,
    rows=data.global_batch_size // step.accumulation,
  )
  tokens = share.rows * step.accumulation * data.seq_len
  parts["batch"] = _BATCH_FIELDS * 4 * tokens

  # ---- What the backward pass needs of the forward pass ----
  precision = resolve(step.precision, platform)
  hidden = share.hidden_values * jnp.dtype(precision.activations).itemsize
  num_layers = model.num_layers if layout is None else layout.depth
  kept = lambda policy, layers, every=1: activations.kept_bytes(
    share,
    layers,
    precision=precision,
    platform=platform,
    remat=policy,
    remat_every=every,
  )
  parts["activations"] = kept(step.remat, num_layers, step.remat_every)
  if offload.activations:
    host += parts["activations"]
    parts["activations"] = 0
  if stages is not None:
    slots = buffers.plan(stages.schedule).sizes
    parts["between stages"] = hidden * (slots["inputs"] + slots["gradients"])
    # Split backward actions keep a stage's activations, and what the weights'
    # gradients are made of.
    parts["activations"] *= slots.get("residuals", 1)
    if "cotangents" in slots:
      outputs = kept("dots", num_layers)
      parts["between stages"] += outputs * slots["cotangents"]

  # ---- What is at work for a moment ----
  layer, head = held.at_work(here, precision)
  parts["a layer at work"] = layer + 2 * hidden
  if step.remat in ("block", "nested"):
    parts["a layer at work"] += kept("dots", 1)
  group = near_root(num_layers) if step.remat == "nested" else step.remat_every
  if group > 1:
    parts["a layer at work"] += group * hidden
  if share.residual_len < share.seq_len:
    # Sums over `tensor` are whole and float32 until they are scattered.
    whole = 4 * share.rows * share.seq_len * model.embed_dim
    parts["a layer at work"] += products_back(model) * whole
  # XLA's form has the logits' gradient beside them, the kernel writes over.
  copies = 1 if platform == "tpu" else 2
  chunk = min(step.loss_chunk, share.rows * share.seq_len // 2)
  parts["logits of a chunk"] = copies * 4 * chunk * share.config.vocab_size
  parts["the head at work"] = head + 2 * hidden
  always = (*BETWEEN_STEPS, "between stages")
  adds_up = ("gradients",) if step.accumulation > 1 or stages else ()
  ends = ("logits of a chunk", "the head at work")
  phases = {
    "loss": (*always, *adds_up, "activations", *ends),
    "backward": (*always, "gradients", "activations", "a layer at work"),
    "update": (*always, "gradients"),
  }
  if stages is not None:
    phases["backward"] += ends
  return Estimate(parts=parts, phases=phases, host=host)


def by_policy(
  config: PretrainConfig, num_devices: int, platform: str
) -> dict[str, int]:
  """Bytes of activations under each policy of `step.remat`."""

  def activations(remat):
    step = dataclasses.replace(
      config.step, remat=remat, remat_every=1, offload=OffloadConfig()
    )
    run = dataclasses.replace(config, step=step)
    return training(run, num_devices, platform).parts["activations"]

  return {name: activations(name) for name in _POLICIES}


def of_loop(
  loop: str, config: PretrainConfig, num_devices: int, platform: str
) -> Estimate:
  """Memory of a loop that trains, or runs, the model of `config`.

  "pretrain" is also SFT. "dpo" holds a frozen float32 reference (one that is
  "precomputed" is gone by then). "ppo" holds policy and critic as they are
  trained, in turn, and reference and reward model frozen, as operands of
  matmuls: 16 + 16 + 2 + 2 bytes a parameter with AdamW in bfloat16. Before an
  update its policy answers; all rows of the batch have a KV cache.

  Args:
    loop: one of `LOOPS`.
    config: of the policy; the other models have its size.
    num_devices: of the machine.
    platform: "tpu", "gpu" or "cpu".

  Raises:
    ValueError: there is no such loop, or see `training`.
  """
  import jax.numpy as jnp

  from model.precision import resolve

  if loop not in LOOPS:
    raise ValueError(f"--loop must be one of {LOOPS}, got {loop!r}")
  step = training(config, num_devices, platform)
  if loop == "pretrain":
    return step
  weights, cache, logits = _run_only(config, num_devices, platform)
  if loop == "generate":
    # `serve` keeps the float32 weights of a checkpoint.
    parts = {"parameters": 4 * weights, "KV cache": cache, "logits": logits}
    return Estimate(parts=parts, phases={"generate": tuple(parts)})
  if loop == "dpo":
    more = {"reference": 4 * weights}
    phases = {name: (*p, *more) for name, p in step.phases.items()}
  else:
    width = jnp.dtype(
      resolve(config.step.precision, platform).operands
    ).itemsize
    critic = step.parts["parameters"] + step.parts["optimizer state"]
    more = {"critic": critic}
    more |= dict.fromkeys(("reference", "reward model"), width * weights)
    phases = {name: (*p, *more) for name, p in step.phases.items()}
    phases["answer"] = (*BETWEEN_STEPS, *more, "KV cache", "logits")
    more |= {"KV cache": cache, "logits": logits}
  return dataclasses.replace(step, parts=step.parts | more, phases=phases)


def _run_only(
  config: PretrainConfig, num_devices: int, platform: str
) -> tuple[int, int, int]:
  """Weights of a model that is not trained, bytes of a KV cache, of logits.

  Weights are split by all rules of the mesh, whatever the ZeRO stage. All rows
  of the batch are generated at once, each by one device's part of the batch.
  """
  from model.accounting import kv_bytes_per_token
  from model.precision import resolve
  from plan import activations, held

  seq_len = config.data.seq_len
  whole = {"zero_stage": 3, "compression": "none", "local": LocalSGDConfig()}
  here = held.hold(
    dataclasses.replace(
      config,
      optimizer=OptimizerConfig(kind="sgd"),
      step=dataclasses.replace(config.step, **whole),
    ),
    num_devices,
  )
  size, _ = held.device_bytes(here.state.model)
  share = activations.share(
    config.model,
    here.mesh.shape,
    dataclasses.replace(config.rules, seq=()),
    seq_len=seq_len,
    rows=config.data.global_batch_size,
  )
  num_layers = here.layout.depth if here.layout else config.model.num_layers
  local = dataclasses.replace(share.config, num_layers=num_layers)
  operands = resolve(config.step.precision, platform).operands
  cache = kv_bytes_per_token(local, operands) * share.rows * seq_len
  return size // 4, cache, 4 * share.rows * local.vocab_size


def run(
  config: PretrainConfig,
  topology: str | None,
  loop: str | None = None,
  json_path: str | None = None,
) -> Estimate:
  """Prints the table of a run, and writes it as JSON.

  Args:
    config: the run.
    topology: of the machine, see `plan.chips.parse`.
    loop: one of `LOOPS`; None: "pretrain".
    json_path: a file for the same figures.

  Raises:
    ValueError: a topology that is not known, or see `training`.
  """
  if not topology:
    raise ValueError("--topology is missing: 'v5e:4x4', 'h100:8', ...")
  machine, loop = parse(topology), loop or "pretrain"
  where = config, machine.num_devices, machine.chip.platform
  found = of_loop(loop, *where)
  policies = {} if loop == "generate" else by_policy(*where)
  print(table(found, machine, policies))
  if json_path:
    values = {
      "topology": topology,
      "loop": loop,
      "hbm": machine.chip.hbm_bytes,
      "fits": found.peak <= machine.chip.hbm_bytes,
      "peak": found.peak,
      "by_phase": found.by_phase,
      "activations": policies,
      **dataclasses.asdict(found),
    }
    pathlib.Path(json_path).write_text(json.dumps(values, indent=2) + "\n")
  return found


def table(
  found: Estimate, machine: Topology, policies: Mapping[str, int]
) -> str:
  """The text that `run` prints."""
  lines = [f"{'part':<26}{'GiB a device':>12}"]
  gib = lambda size: f"{size / GIB:12.3f}"
  lines += [
    f"{name:<26}{gib(size)}" for name, size in found.parts.items() if size
  ]
  if found.host:
    lines.append(f"{'in host memory':<26}{gib(found.host)}")
  if policies:
    lines += ["", "activations by step.remat"]
  lines += [f"  {name:<24}{gib(size)}" for name, size in policies.items()]
  lines += ["", "live at the same time"]
  lines += [f"  {name:<24}{gib(size)}" for name, size in found.by_phase.items()]
  hbm = machine.chip.hbm_bytes
  lines.append(
    f"\npeak {found.peak / GIB:.2f} of {hbm / GIB:.1f} GiB,"
    f" {machine.num_devices} x {machine.chip.name}:"
    f" {'fits' if found.peak <= hbm else 'does not fit'}"
  )
  if found.peak > hbm:
    lines.append(advice(found, machine))
  return "\n".join(lines)


# Part -> what makes it smaller.
_REMEDIES = {
  "parameters": "more devices on mesh.fsdp, tensor or pipeline with"
  " step.zero_stage=3; optimizer.master_weights=true; step.offload",
  "optimizer state": "more devices on mesh.fsdp, tensor or pipeline;"
  " step.offload.optimizer=true",
  "replicas that train apart": "more devices on mesh.fsdp or tensor;"
  " step.local.steps=none",
  "gradients": "more devices on mesh.fsdp with step.zero_stage=2 or 3;"
  " optimizer.master_weights=true; step.offload.gradients=true",
  "activations": "a stronger step.remat (see above); more step.accumulation;"
  " mesh.context or mesh.tensor; step.offload.activations=true",
  "between stages": "smaller micro-batches: more step.accumulation",
  "a layer at work": "mesh.tensor; smaller micro-batches: more"
  " step.accumulation",
  "logits of a chunk": "a smaller step.loss_chunk; mesh.tensor",
  "the head at work": "mesh.tensor, which splits the vocabulary",
  "KV cache": "fewer rows a device; mesh.tensor",
  "critic": "more devices on mesh.fsdp or tensor",
  "reference": "more devices on mesh.fsdp or tensor",
}


def advice(found: Estimate, machine: Topology) -> str:
  """What to change, largest part of the worst moment first."""
  names = [n for n in found.phases[found.peak_phase] if n in _REMEDIES]
  worst = sorted(names, key=lambda n: -found.parts.get(n, 0))[:3]
  missing = (found.peak - machine.chip.hbm_bytes) / GIB
  lines = [f"{missing:.2f} GiB too much; what to change:"]
  for name in worst:
    size = found.parts[name] / GIB
    lines.append(f"  {name}, {size:.2f} GiB: {_REMEDIES[name]}")
  return "\n".join(lines)


if __name__ == "__main__":
  cli.launch(
    lambda config, topology, loop, json: run(config, topology, loop, json),
    PretrainConfig,
    options={
      "topology": "the machine: v5e:4x4, v5p:2x(4x4x4), h100:16x8, ...",
      "loop": f"{', '.join(LOOPS)}; pretrain if not given",
      "json": "a file for the same figures",
    },
  )
