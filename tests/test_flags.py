"""The flags of every main are frozen, and their --help comes at once.

A new knob belongs into the dataclass of the part that reads it, where
`--config.KEY=VALUE` reaches it. A new flag is a decision: write it down here.
"""

import ast
import pathlib
import re
import resource
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_ROOMS = {path.parent.name for path in _ROOT.glob("*/__init__.py")}

_FLAGS = {
  "align.dpo": {"config", "workdir"},
  "data.prepare": {"config", "workdir"},
  "pallas_kernels.report": {
    "blocks",
    "only_peer",
    "op",
    "peer",
    "search",
    "shape",
    "top",
    "topology",
  },
  "pallas_kernels.schedule": set(),
  "sharding.schedule_picture": set(),
  "train.report": set(),
  "plan.claims": set(),
  "plan.cost": {"batch", "config", "mfu", "prices", "topology"},
  "plan.dryrun": {"config", "json", "loop", "topology"},
  "plan.memory": {"config", "json", "loop", "topology"},
  "plan.mesh_search": {
    "config",
    "global_batch_tokens",
    "json",
    "model",
    "seq_len",
    "show",
    "topology",
    "verify",
  },
  "plan.scaling_laws": {"flops", "plot", "runs", "samples"},
  "serve.chat": {
    "max_new_tokens",
    "model",
    "prompt",
    "seed",
    "system",
    "temperature",
    "top_p",
  },
  "examples.demo": {"seed", "workdir"},
  "train.launch": {"heartbeat_seconds", "num_processes"},
  "train.pretrain": {"config", "workdir"},
  "train.sft": {"config", "workdir"},
  "train.watchdog": set(),
}


def _has_main(path: pathlib.Path) -> bool:
  return any(
    isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
    for node in ast.parse(path.read_text()).body
  )


def _mains() -> set[str]:
  rooms = (_ROOMS | {"examples"}) - {"benchmarks", "tests"}
  paths = [p for room in rooms for p in (_ROOT / room).rglob("*.py")]
  names = [".".join(p.relative_to(_ROOT).with_suffix("").parts) for p in paths]
  return {
    name.removesuffix(".__main__")
    for name, path in zip(names, paths)
    if _has_main(path)
  }


def test_every_main_is_listed():
  assert _mains() == set(_FLAGS)


@pytest.mark.parametrize("main", sorted(_FLAGS))
def test_help(main):
  code = (
    "import atexit, runpy, sys\n"
    "heavy = {'jax', 'flax', 'orbax', 'grain', 'torch'}\n"
    "atexit.register(lambda: print('heavy:', heavy & set(sys.modules)))\n"
    f"sys.argv = ['{main}', '--help']\n"
    f"runpy.run_module('{main}', run_name='__main__')\n"
  )
  seconds = []
  for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    got = subprocess.run(
      [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Not by the clock: other processes may hold the cores.
    seconds.append(
      after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    )
  text = got.stdout + got.stderr
  flags = set(re.findall(r"^ +--(?:\[no\])?(\w+)[: ]", text, re.MULTILINE))
  assert flags == _FLAGS[main], text
  assert "heavy: set()" in text, "--help imports more than it shows"
  assert min(seconds) < 0.4
