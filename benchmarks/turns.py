"""Contestants that take turns, so that a noisy machine is fair to all.

Each contestant is a process of its own (`python -m MODULE ARGS`) that builds
its step once and then answers, line by line on standard input: "run N" takes N
steps, "quit" ends it. It answers with one line of JSON.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

# glibc then backs large blocks with huge pages and keeps those that were
# freed: a step's buffers are otherwise faulted in anew at every step. XLA asks
# for them in threads, whose own arenas would return them to the system still.
HUGE_PAGES = {
  "GLIBC_TUNABLES": ":".join(
    (
      "glibc.malloc.hugetlb=1",
      "glibc.malloc.mmap_max=0",
      "glibc.malloc.trim_threshold=10000000000",
      "glibc.malloc.arena_max=1",
    )
  )
}


def serve(step: Callable[[], float | None], **facts) -> None:
  """The contestant's side: takes `step` as often as it is told.

  Args:
    step: runs one step and waits for its result. It may return the seconds
      that count, if those are not all that it takes.
    **facts: what to tell about the contestant: versions, settings.
  """
  # Libraries print what they like; answers go where nothing else does.
  answers = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(2, 1)
  start = time.perf_counter()
  step()
  facts["first_step_seconds"] = round(time.perf_counter() - start, 2)
  step()
  print(json.dumps(facts), file=answers)
  for line in sys.stdin:
    command, *count = line.split()
    if command == "quit":
      break
    seconds = []
    for _ in range(int(count[0])):
      start = time.perf_counter()
      counted = step()
      elapsed = time.perf_counter() - start
      seconds.append(elapsed if counted is None else counted)
    print(json.dumps(seconds), file=answers)
  usage = resource.getrusage(resource.RUSAGE_SELF)
  print(json.dumps({"peak_rss_mib": usage.ru_maxrss // 1024}), file=answers)


class Contestant:
  """The referee's side of a contestant."""

  def __init__(
    self,
    module: str,
    *args: str,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
  ):
    """Starts it and waits until it is ready."""
    self._process = subprocess.Popen(
      [python, "-m", module, *args],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | dict(env or {}),
    )
    self.facts = self._answer()

  def run(self, count: int) -> list[float]:
    """Seconds of each of `count` steps."""
    self._tell(f"run {count}")
    return self._answer()

  def quit(self) -> None:
    """Ends it; its peak memory joins `facts`."""
    self._tell("quit")
    self.facts |= self._answer()
    self._process.wait()

  def _tell(self, command: str) -> None:
    self._process.stdin.write(command + "\n")
    self._process.stdin.flush()

  def _answer(self):
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(f"{self._process.args} ended: see what it printed")
    return json.loads(line)


def race(
  contestants: Mapping[str, Contestant], *, rounds: int, steps: int
) -> dict[str, list[float]]:
  """Lets all run in turn; the median seconds of a step, round by round."""
  seconds = {name: [] for name in contestants}
  for number in range(rounds):
    # The order turns too: nobody always runs after the same neighbour.
    names = list(contestants)
    shift = number % len(names)
    for name in names[shift:] + names[:shift]:
      runs = contestants[name].run(steps)
      seconds[name].append(statistics.median(runs))
  for contestant in contestants.values():
    contestant.quit()
  return seconds


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
  """How many times faster we are: the median of the rounds' ratios."""
  pairs = zip(ours, theirs, strict=True)
  return statistics.median(their / our for our, their in pairs)
