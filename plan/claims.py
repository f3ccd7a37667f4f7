"""What the articles say of memory, compute and money, and what comes out here.

  python -m plan.claims

A Markdown table. Every number of the second column is computed, by the same
functions that plan a run.
"""

import dataclasses
import sys

from absl import app

from plan.chips import CHIPS, parse

# The "7B" and "70B" of the articles.
SEVEN, SEVENTY = 7e9, 70e9
DAY = 86_400


@dataclasses.dataclass(frozen=True)
class Claim:
  """One line of the table.

  Attributes:
    says: the article.
    computed: the same number here.
    why: where a difference comes from; "right" if there is none.
  """

  says: str
  computed: str
  why: str


def claims() -> list[Claim]:
  """All lines."""
  return [*_memory(), *_compute(), *_parallel()]


def _memory() -> list[Claim]:
  state = {
    name: size * SEVEN / 1e9 for name, size in bytes_a_parameter(1, 3).items()
  }
  parts = " + ".join(f"{gb:.0f}" for gb in state.values())
  eighth = sum(bytes_a_parameter(8, 3).values()) * SEVEN / 1e9
  peak = seven_on_eight()
  stage = lambda n, mixed: (
    16 / sum(bytes_a_parameter(64, n, mixed=mixed).values())
  )
  frozen = 2
  four = 16 + 16 + frozen + frozen
  return [
    Claim(
      "7B, AdamW, float32: 28 + 28 + 56 = 112 GB",
      f"{parts} = {sum(state.values()):.0f} GB",
      "right",
    ),
    Claim(
      "with bfloat16 and ZeRO-3 on 8 GPUs: 112 / 8 = 14 GB a GPU",
      f"{eighth:.1f} GB of state; {peak / 1e9:.1f} GB at the peak of a step of"
      " 1 row of 2048 tokens a GPU, blocks recomputed",
      "right for the state, which mixed precision does not shrink (2 + 2 + 12"
      " bytes); activations and a layer at work come on top",
    ),
    Claim(
      "ZeRO-1 saves 4x, ZeRO-2 8x",
      f"{stage(1, False):.1f}x and {stage(2, False):.1f}x of the 4 + 4 + 8"
      f" bytes of their own table; {stage(1, True):.1f}x and"
      f" {stage(2, True):.1f}x of 2 + 2 + 12 (64 GPUs)",
      "the figures are those of mixed precision on many GPUs",
    ),
    Claim(
      "70B: weights, gradients and optimizer state take about 1.5 TB",
      f"{16 * SEVENTY / 1e12:.2f} TB at 16 bytes a parameter",
      f"1.5 TB are {1.5e12 / SEVENTY:.0f} bytes a parameter: 16 and a second,"
      " float32 gradient are 20",
    ),
    Claim(
      "PPO's four models take at least 4 times the model",
      f"{four} bytes a parameter: {four / 16:.2f} times the 16 of training one,"
      f" {four / 2:.0f} times its bfloat16 weights",
      "policy and critic are trained, reference and reward model only run;"
      " KV caches come on top",
    ),
  ]


def _compute() -> list[Claim]:
  from plan.scaling_laws import FLOPS_A_TOKEN, tokens_a_parameter

  machine = parse("h100:1024x8")
  peak = machine.num_devices * machine.chip.flops["bfloat16"]
  budget = 6e24
  mfu = budget / (peak * 75 * DAY)
  days = budget / (0.4 * peak) / DAY
  month = 1000 * 0.4 * CHIPS["a100"].flops["bfloat16"] * 30 * DAY
  needs = FLOPS_A_TOKEN * SEVEN * 140e9
  params, tokens = tokens_a_parameter().optimum(month)
  return [
    Claim(
      "70B on 8192 H100: 6e24 FLOPs in 2 to 3 months",
      f"in 75 days that is {mfu:.0%} MFU; at 40 % it is {days:.0f} days",
      "the other article calls 40 to 60 % normal",
    ),
    Claim(
      "6e24 FLOPs for 70B",
      f"{budget / FLOPS_A_TOKEN / SEVENTY / 1e12:.1f}T tokens by C = 6 N D",
      "right: Llama 3 saw 15T",
    ),
    Claim(
      "1000 GPUs for a month: train 7B on 140B tokens",
      f"that takes {needs:.1e} FLOPs of {month:.1e} (A100, 40 % MFU):"
      f" {month / needs:.0f} times less. The whole buys"
      f" {params / 1e9:.0f}B parameters and {tokens / 1e12:.1f}T tokens",
      "20 tokens a parameter are right, the budget is not",
    ),
    Claim(
      "recomputing all activations costs 33 % more, memory falls to O(sqrt L)",
      "{:.0%} more FLOPs with one kept input a layer, {:.0%} with O(sqrt L) of"
      " them".format(*recomputed()),
      "O(sqrt L) computes most layers twice more, not once",
    ),
    Claim(
      "MFU counts 6 FLOPs a parameter and token",
      f"{attention_share():.0%} more with attention, 7B at 2048 tokens,"
      " counted where the mask allows",
      "6 N leaves attention out, and counts the lookup of embeddings",
    ),
  ]


def _parallel() -> list[Claim]:
  from plan.cost import effective_batch
  from sharding.collectives import zero_bytes

  machine = parse("h100:1024x8")
  ratio = zero_bytes(1.0, 8, stage=3) / zero_bytes(1.0, 8, stage=0)
  return [
    Claim(
      "ring AllReduce: 2 (N-1)/N M, nearly twice the lower bound; ZeRO-3 adds"
      " 1.5x to it",
      f"ZeRO-3 sends {ratio:.1f} times as much, in all",
      "2 (N-1)/N M is the lower bound; 3 M stand against 2 M",
    ),
    Claim(
      "TP 8 x PP 8 x DP 128 on 8192 GPUs",
      f"{8 * 8 * 128} of {machine.num_devices};"
      f" {16 * SEVENTY / 64 / 1e9:.1f} GB of state a GPU without ZeRO",
      "right",
    ),
    Claim(
      "2 rows x 8 micro-batches x 64 GPUs = 1024 rows",
      f"{effective_batch(2, 8, 64)}",
      "right where every GPU is a replica: tensor, context and pipeline"
      " parallelism make none",
    ),
  ]


def _run(num_devices: int, *, stage: int, mixed: bool, **step):
  """A run of 7.00e9 parameters, a row of 2048 tokens a device."""
  from data.config import DataConfig, TokenSource
  from model.families.llama import llama2_7b
  from sharding.axes import MeshConfig
  from train.config import OptimizerConfig, StepConfig
  from train.run_config import PretrainConfig

  return PretrainConfig(
    # With twice the vocabulary Llama 2 7B has 7.00e9 parameters.
    model=dataclasses.replace(llama2_7b(), vocab_size=64_000),
    data=DataConfig(
      sources=(TokenSource(path="none"),),
      tokenizer="none",
      seq_len=2048,
      global_batch_size=2 * num_devices,
    ),
    num_steps=1,
    mesh=MeshConfig(fsdp=num_devices),
    optimizer=OptimizerConfig(master_weights=mixed),
    step=StepConfig(zero_stage=stage, accumulation=2, **step),
  )


def bytes_a_parameter(
  num_devices: int, stage: int, *, mixed: bool = False
) -> dict[str, float]:
  """Weights, gradients and AdamW's state on a device, over all parameters."""
  from model.accounting import num_parameters
  from plan.memory import training

  config = _run(num_devices, stage=stage, mixed=mixed, remat="block")
  parts = training(config, num_devices, "gpu").parts
  names = ("parameters", "gradients", "optimizer state")
  return {name: parts[name] / num_parameters(config.model) for name in names}


def seven_on_eight() -> int:
  """Bytes at the peak of a step of 7B on 8 GPUs with ZeRO-3."""
  from plan.memory import training

  return training(_run(8, stage=3, mixed=True, remat="block"), 8, "gpu").peak


def recomputed() -> tuple[float, float]:
  """FLOPs that "block" and "nested" add to 7B at 2048 tokens, over all."""
  from model.accounting import hardware_flops_per_token
  from model.families.llama import llama2_7b

  none, block, nested = (
    hardware_flops_per_token(llama2_7b(), 2048, remat)
    for remat in ("none", "block", "nested")
  )
  return block / none - 1, nested / none - 1


def attention_share() -> float:
  """Exact FLOPs of 7B at 2048 tokens over 6 N, less one."""
  from model.accounting import flops_per_token, num_parameters
  from model.families.llama import llama2_7b

  model = llama2_7b()
  return flops_per_token(model, 2048) / (6 * num_parameters(model)) - 1


def main(argv) -> None:
  """Prints the table."""
  if len(argv) > 1:
    sys.exit(f"error: no arguments are wanted, got {argv[1:]}")
  print("| the article says | computed | why |\n|---|---|---|")
  for claim in claims():
    print(f"| {claim.says} | {claim.computed} | {claim.why} |")


if __name__ == "__main__":
  app.run(main)
