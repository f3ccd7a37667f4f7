"""What a user waits for: start-up, `--help`, and the host's share of a step.

  python -m benchmarks.startup

Runs the demo's pretraining on a small part of its corpus and prints one JSON
object, in seconds (medians):

- `cold`: process start to the end of step 1, nothing compiled before;
- `warm`: the same with a compilation cache;
- `help`: `python -m train.pretrain --help`;
- `host_step`: a step of the real loop around a step that computes nothing:
  dispatch of the whole state, loader hand-over, metrics and progress bar. It
  waits for loader threads, which run flat out beside a step of no length;
- `host_step_cpu`: the CPU time of its main thread alone;
- `host_step_parts`: the functions that take most of it, by profiler.
"""

import argparse
import cProfile
import dataclasses
import itertools
import json
import os
import pathlib
import pstats
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import turns

CHILD = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
from benchmarks import startup
startup.first_step(*sys.argv[1:])
"""
STEPS = 300


def prepare(folder: pathlib.Path) -> None:
  """Writes the demo's token stores, of a part of its corpus."""
  from data import prepare as prepare_lib
  from examples.demo import configs, corpus

  documents = folder / "corpus.jsonl"
  corpus.write_documents(documents, corpus.source_files(300))
  prepare_lib.run(configs.corpus(documents, configs.Sizes()), folder / "corpus")


def config_of(folder: pathlib.Path, **changes):
  """The demo's pretraining, without its evaluation."""
  from examples.demo import configs
  from train.run_config import HeldOutConfig

  config = configs.pretrain(folder, configs.Sizes())
  return dataclasses.replace(config, held_out=HeldOutConfig(), **changes)


def first_step(folder: str, workdir: str, cache: str) -> None:
  """The child: trains one step."""
  from train import pretrain

  config = config_of(pathlib.Path(folder), num_steps=1, compilation_cache=cache)
  pretrain.run(config, workdir)


def seconds_to_first_step(folder: pathlib.Path, cache: pathlib.Path) -> float:
  """From process start to the line of step 1 in metrics.jsonl."""
  with tempfile.TemporaryDirectory() as workdir:
    start = time.perf_counter()
    child = subprocess.Popen(
      [sys.executable, "-c", CHILD, str(folder), workdir, str(cache)],
      stderr=subprocess.DEVNULL,
      env=os.environ | {"JAX_PLATFORMS": "cpu"} | turns.HUGE_PAGES,
    )
    record = pathlib.Path(workdir, "metrics.jsonl")
    while child.poll() is None:
      if record.is_file() and record.stat().st_size:
        break
      time.sleep(0.005)
    seconds = time.perf_counter() - start
    if child.wait():
      raise RuntimeError(f"the run ended with code {child.returncode}")
    return seconds


def seconds_of_help() -> float:
  """Of `--help` of a main."""
  start = time.perf_counter()
  subprocess.run(
    [sys.executable, "-m", "train.pretrain", "--help"],
    stdout=subprocess.DEVNULL,
    check=False,  # absl ends with 1 after help.
  )
  return time.perf_counter() - start


def host_step(
  folder: pathlib.Path,
) -> tuple[list[float], list[float], list[str]]:
  """Steps of the loop around nothing: wall and CPU seconds, what takes them."""
  import jax
  import jax.numpy as jnp

  from data import tokenizer as tokenizer_lib
  from data.loader import open_loader
  from model.transformer import Transformer
  from sharding.arrays import batch_sharding, to_global
  from sharding.mesh import make_mesh
  from sharding.rules import replicated
  from train.loop import fit
  from train.optimizers import make_optimizer
  from train.schedules import make_schedule
  from train.state import abstract_state, init_state, shardings_of
  from train.step import TrainStep

  config = config_of(folder, num_steps=STEPS)
  mesh, rules = make_mesh(config.mesh), config.rules
  optimizer = make_optimizer(
    config.optimizer, make_schedule(config.schedule, STEPS)
  )
  make_model = lambda rngs: Transformer(config.model, rngs=rngs)
  placed = {"mesh": mesh, "rules": rules}
  abstract = abstract_state(make_model, optimizer, **placed)
  state = init_state(make_model, optimizer, seed=0, **placed)
  times = []

  places, tree = jax.tree.flatten(shardings_of(abstract))

  def nothing(leaves, batch):
    state = tree.unflatten(leaves)
    state = dataclasses.replace(state, step=state.step + 1)
    names = "loss nll z_loss grad_norm clip_factor param_norm learning_rate"
    zero = jnp.float32(0) * batch["loss_weights"][0, 0]
    return jax.tree.leaves(state), dict.fromkeys(names.split(), zero)

  compiled = jax.jit(
    nothing,
    donate_argnums=0,
    in_shardings=(places, batch_sharding(mesh, rules)),
    out_shardings=(places, replicated(mesh)),
  )

  def timed(leaves, batch):
    times.append((time.perf_counter(), time.thread_time()))
    return compiled(leaves, batch)

  step = TrainStep(timed, tree)

  profile = cProfile.Profile()
  with tempfile.TemporaryDirectory() as workdir:
    arguments = dict(
      config=config,
      workdir=pathlib.Path(workdir),
      place=lambda batch: to_global(batch, mesh, rules),
    )
    batches = open_loader(
      config.data, tokenizer_lib.load(config.data.tokenizer)
    )
    fit(state, step, batches, **arguments)
    wall, cpu = (
      [after - before for before, after in itertools.pairwise(clock)]
      for clock in zip(*times[20:], strict=True)
    )
    state = init_state(make_model, optimizer, seed=0, **placed)
    profile.enable()
    fit(
      state,
      step,
      batches,
      **arguments | {"workdir": pathlib.Path(workdir, "2")},
    )
    profile.disable()
  stats = pstats.Stats(profile).stats
  top = sorted(stats.items(), key=lambda item: -item[1][2])[:12]
  parts = [
    f"{1e6 * own / STEPS:.0f} us {pathlib.Path(file).name}:{line} {name}"
    for (file, line, name), (_, _, own, _, _) in top
  ]
  return wall, cpu, parts


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--rounds", type=int, default=3)
  options = parser.parse_args()
  os.environ["JAX_PLATFORMS"] = "cpu"
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    prepare(folder)
    cold = [
      seconds_to_first_step(folder, folder / f"cache{i}")
      for i in range(options.rounds)
    ]
    warm = [
      seconds_to_first_step(folder, folder / "cache0")
      for _ in range(options.rounds)
    ]
    helps = [seconds_of_help() for _ in range(options.rounds)]
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    wall, cpu, parts = host_step(folder)
  result = {
    "cold": round(statistics.median(cold), 2),
    "warm": round(statistics.median(warm), 2),
    "help": round(statistics.median(helps), 3),
    "host_step": round(statistics.median(wall), 5),
    "host_step_cpu": round(statistics.median(cpu), 5),
    "host_step_parts": parts,
    "jax": jax.__version__,
  }
  print(json.dumps(result))


if __name__ == "__main__":
  main()
