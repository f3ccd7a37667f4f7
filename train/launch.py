r"""Runs a training main as several processes on this machine, and watches them.

  python -m train.launch --num_processes=2 -- \
    python -m train.pretrain --config=FILE.py --workdir=DIR

For laptops and tests: JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 gives each
process four devices. Of several machines each starts its own process, with
--config.distributed.coordinator and so on.

When a process dies, the launcher says which and how, ends the others and says
where the run goes on.
"""

import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from absl import app, flags

from sharding.distributed import DistributedConfig
from train.preemption import EXIT_CODE as PREEMPTED
from train.watchdog import resume_hint

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_processes", 2, "how many", lower_bound=1)
flags.DEFINE_integer(
  "heartbeat_seconds",
  DistributedConfig.heartbeat_seconds,
  "who is silent for so long is dead; the others end within twice that time",
  lower_bound=1,
)
_POLL_SECONDS = 0.05


def launch(
  command: Sequence[str], *, num_processes: int, heartbeat_seconds: int
) -> int:
  """Runs `command` as several processes, to their end.

  Args:
    command: a training main without the settings `config.distributed`.
    num_processes: how many.
    heartbeat_seconds: how long the others have to end after one died.

  Returns:
    0; or the code of the first process that died (128 and its number for a
    signal); or 143: SIGTERM came, and the run was saved.
  """
  with socket.create_server(("localhost", 0)) as free:
    port = free.getsockname()[1]
  processes = []
  for i in range(num_processes):
    settings = {
      "coordinator": f"localhost:{port}",
      "num_processes": num_processes,
      "process_id": i,
      "heartbeat_seconds": heartbeat_seconds,
      "watchdog": "false",  # This is one.
    }
    flags = [f"--config.distributed.{k}={v}" for k, v in settings.items()]
    processes.append(
      subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
      )
    )
  readers = [
    threading.Thread(target=_copy_lines, args=(i, process.stdout))
    for i, process in enumerate(processes)
  ]
  for reader in readers:
    reader.start()
  forward = lambda number, _: [p.send_signal(number) for p in processes]
  before = signal.signal(signal.SIGTERM, forward)
  try:
    code = _watch(processes, heartbeat_seconds, _checkpoints(command))
  finally:
    for process in processes:
      process.kill()
    signal.signal(signal.SIGTERM, before)
  for reader in readers:
    reader.join()
  return code


def _watch(
  processes: Sequence[subprocess.Popen],
  grace_seconds: float,
  checkpoints: pathlib.Path | None,
) -> int:
  """Waits for all processes; once one is dead, for `grace_seconds` more."""
  first, deadline = None, float("inf")
  codes = [None]
  while None in codes:
    time.sleep(_POLL_SECONDS)
    codes = [process.poll() for process in processes]
    dead = [i for i, code in enumerate(codes) if code and code != PREEMPTED]
    if dead and first is None:
      first, deadline = dead[0], time.monotonic() + grace_seconds
      _say(
        f"process {first} of {len(processes)} {_how(codes[first])}. The others"
        f" are ended within {grace_seconds} s."
      )
    if time.monotonic() > deadline:
      for process in processes:
        process.kill()
  if first is None:
    return max(codes)
  _say(resume_hint(checkpoints))
  return codes[first] if codes[first] > 0 else 128 - codes[first]


def _copy_lines(process_id: int, pipe) -> None:
  """Passes on what a process says, each line with its number."""
  with pipe:
    for line in pipe:
      text = line.decode(errors="replace")
      print(f"[{process_id}] {text}", end="", flush=True)


def _checkpoints(command: Sequence[str]) -> pathlib.Path | None:
  """The folder `checkpoints` of the run that a command starts."""
  for argument in command:
    if match := re.fullmatch("--?workdir=(.+)", argument):
      return pathlib.Path(match[1]).absolute() / "checkpoints"
  return None


def _how(code: int) -> str:
  """A return code in words."""
  if code < 0:
    return f"was killed by {signal.Signals(-code).name}"
  return f"ended with exit code {code}"


def _say(text: str) -> None:
  print(f"[launch] {text}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> None:
  """Runs what stands behind `--`."""
  if len(argv) < 2:
    sys.exit(
      "error: wanted -- and a command, as in `python -m train.launch -- python"
      " -m train.pretrain --config=FILE.py --workdir=DIR`"
    )
  sys.exit(
    launch(
      argv[1:],
      num_processes=FLAGS.num_processes,
      heartbeat_seconds=FLAGS.heartbeat_seconds,
    )
  )


if __name__ == "__main__":
  app.run(main)
