"""What replicas that say less to each other cost in loss, and save in bytes.

  python -m benchmarks.replicas --steps 900 --ways none int8 local-20

Pretrains the demo's model on the demo's text with two replicas, emulated CPU
devices, once for each way in which they may talk, and prints a JSON object a
line:

- `held_out_loss`: nats a token of held-out text, after `steps`;
- `behind`: that loss over the one of the way `none`, less 1;
- `sent`: bytes that a device sends over `data` in a step on average, by the
  compiled program; of 1-bit Adam, and of the largest entries, after a fifth of
  the steps, in which gradients cross whole.

local-H are replicas that meet every H steps, local-H-late those whose meeting
is hidden by a step, average-H those that are just averaged (outer learning rate
1, no momentum); adamw-unclipped is what 1-bit Adam would be without its
compression.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

WAYS = ("none", "int8", "largest", "signs", "local-20", "local-20-late")
# Part of all steps in which those two send gradients whole.
WHOLE = 0.2


def prepare(folder: pathlib.Path) -> None:
  """The text of the demo, once."""
  from data import prepare as data
  from examples.demo import configs, corpus

  if (folder / "corpus" / "heldout").exists():
    return
  folder.mkdir(exist_ok=True, parents=True)
  sizes = configs.Sizes()
  documents = folder / "all.jsonl"
  corpus.write_documents(documents, corpus.source_files(sizes.max_files))
  kept, held_out, _ = data.select(configs.corpus(documents, sizes))
  some = corpus.sample(kept, max_chars=sizes.corpus_chars, seed=sizes.seed)
  corpus.write_documents(folder / "corpus.jsonl", [*some, *held_out])
  data.run(configs.corpus(folder / "corpus.jsonl", sizes), folder / "corpus")


def config_of(way: str, folder: pathlib.Path, *, steps: int, seed: int):
  """The demo's config, but for what replicas say."""
  from examples.demo import configs
  from sharding.axes import MeshConfig
  from train.config import LocalSGDConfig

  config = configs.pretrain(folder, configs.Sizes(pretrain_steps=steps))
  step, optimizer = config.step, config.optimizer
  match way.split("-"):
    case ["none"]:
      pass
    case ["local", every, *late]:
      local = LocalSGDConfig(steps=int(every), delay=len(late))
      step = dataclasses.replace(step, local=local)
    case ["average", every]:
      local = LocalSGDConfig(
        steps=int(every), outer_learning_rate=1.0, outer_momentum=0.0
      )
      step = dataclasses.replace(step, local=local)
    case ["adamw", "unclipped"]:
      optimizer = dataclasses.replace(optimizer, clip_norm=None)
    case ["signs"]:
      step = dataclasses.replace(step, compression="signs")
      optimizer = dataclasses.replace(
        optimizer,
        kind="onebit_adam",
        freeze_step=round(WHOLE * steps),
        # The variance will stand still: it must not be of the last steps only.
        b2=0.999,
        clip_norm=None,
      )
    case ["largest"]:
      step = dataclasses.replace(
        step, compression=way, whole_steps=round(WHOLE * steps)
      )
    case _:
      step = dataclasses.replace(step, compression=way)
  return dataclasses.replace(
    config,
    seed=seed,
    mesh=MeshConfig(data=2, fsdp=1),
    held_out=dataclasses.replace(config.held_out, num_batches=32),
    monitor=dataclasses.replace(config.monitor, eval_every=steps),
    step=step,
    optimizer=optimizer,
  )


def sent(config) -> float:
  """Bytes over `data` in a step, by the compiled step of a config."""
  from sharding.hlo import collectives
  from sharding.mesh import make_mesh
  from train import pretrain

  mesh, local = make_mesh(config.mesh), config.step.local
  lowered = pretrain.program(config, mesh).lower()
  compiled = lowered.compile({"xla_backend_optimization_level": 0})
  total = 0.0
  for op in collectives(compiled.as_text(), mesh):
    if "data" not in op.axes:
      continue
    share = 1.0
    if op.in_branch and local.steps is not None:
      share = 1 / local.steps
    elif op.in_branch and op.kind == "all-reduce":
      share = 0.0  # The whole gradients of the first steps.
    total += share * op.bytes_sent
  return total


def measure(way: str, args: argparse.Namespace) -> dict:
  """Trains in one way."""
  from train import pretrain

  config = config_of(
    way, pathlib.Path(args.folder), steps=args.steps, seed=args.seed
  )
  with tempfile.TemporaryDirectory() as workdir:
    last = pretrain.run(config, workdir).history[-1]
  return {
    "way": way,
    "steps": args.steps,
    "seed": args.seed,
    "held_out_loss": round(last["held_out_loss"], 4),
    "sent": round(sent(config)),
  }


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--ways", nargs="+", default=[*WAYS])
  parser.add_argument("--steps", type=int, default=900)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--folder", default="runs/replicas", help="keeps the demo's text"
  )
  parser.add_argument("--one", help="a single way, in this process")
  args = parser.parse_args()
  if args.one:
    print(json.dumps(measure(args.one, args)), flush=True)
    return
  prepare(pathlib.Path(args.folder))
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "2",
    # Collectives wait in threads of a pool, which must not run out of them.
    "NPROC": "32",
  }
  plain = None
  for way in args.ways:
    done = subprocess.run(
      [
        *(sys.executable, "-m", "benchmarks.replicas", "--one", way),
        *("--steps", str(args.steps), "--seed", str(args.seed)),
        *("--folder", args.folder),
      ],
      env=environment,
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if way == "none":
      plain = found["held_out_loss"]
    if plain is not None:
      found["behind"] = round(found["held_out_loss"] / plain - 1, 5)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
  main()
