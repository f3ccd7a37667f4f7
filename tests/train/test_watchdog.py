"""Companions tell who was the first to die, on every host, and only then."""

import contextlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.train import hosts_run, tiny_run
from train import manifest, watchdog

HEARTBEAT = 2


class Host:
  """A companion with the end of the pipe that its process would hold."""

  def __init__(self, number: int, count: int, port: int, *files: int):
    arguments = (number, count, HEARTBEAT, "localhost", port, *files)
    self.process = subprocess.Popen(
      [sys.executable, "-m", "train.watchdog", *map(str, arguments)],
      cwd=hosts_run.ROOT,
      stdin=subprocess.PIPE,
      stderr=subprocess.PIPE,
      pass_fds=files,
      text=True,
    )
    self.end = watchdog.Companion(self.process.stdin.buffer)

  def said(self) -> str:
    """What it printed, to its end."""
    found = self.process.stderr.read()
    assert self.process.wait(10) == 0
    return found


@pytest.fixture
def hosts(tmp_path):
  """Three companions that know each other, and where the run saves."""
  with socket.create_server(("localhost", 0)) as listener:
    port = listener.getsockname()[1]
    found = [Host(0, 3, port, listener.fileno())]
    found += [Host(i, 3, port) for i in (1, 2)]
    for host in found:
      host.end.saves_to(tmp_path)
    ready = found[0].process.stderr.readline()
    assert ready == "[watchdog 0] watches over 3 processes.\n"
    time.sleep(0.5)  # The others read their pipes once they are connected.
  yield found
  for host in found:
    host.process.kill()
    host.process.wait()
    for pipe in (host.process.stdin, host.process.stderr):
      with contextlib.suppress(BrokenPipeError):
        pipe.close()


@pytest.mark.parametrize(
  "host, address",
  [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")],
)
def test_a_run_of_one_machine_listens_to_it_alone(host, address):
  if address == "::1" and not socket.has_dualstack_ipv6():
    pytest.skip("no IPv6 here")
  with watchdog.listen(host) as listener:
    assert listener.getsockname()[0] == address


def test_a_run_of_several_machines_listens_to_all():
  # Its own address, by which the machine does not know what others call it.
  with watchdog.listen("host-0.example") as listener:
    assert listener.getsockname()[0] in ("::", "0.0.0.0")


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_all_say_who_died(hosts, victim, tmp_path):
  for step in (4, 8):
    (tmp_path / str(step)).mkdir()
  manifest.write(tmp_path / "4", {"step": 4})  # 8 is unfinished.
  hosts[victim].process.stdin.close()
  for i, host in enumerate(hosts):
    lines = host.said().splitlines()
    assert lines == [
      f"[watchdog {i}] process {victim} of 3 ended before the run did.",
      f"[watchdog {i}] The others end as well. Started again with the same"
      f" workdir, the run resumes from {tmp_path}/4.",
    ]


def test_only_the_first_death_is_told(hosts):
  """JAX takes the others along."""
  hosts[2].process.stdin.close()
  time.sleep(0.3)
  for i in (1, 0):
    hosts[i].process.stdin.close()
  for host in hosts:
    said = host.said()
    assert "process 2 of 3 ended" in said
    assert said.count("process") == 1
    assert "no checkpoint yet" in said


@pytest.mark.parametrize("victim", [0, 1])
def test_a_machine_that_is_gone_takes_its_companion_along(hosts, victim):
  hosts[victim].process.kill()
  for i in {0, 1, 2} - {victim}:
    assert f"process {victim} of 3 is out of reach" in hosts[i].said()


def test_a_companion_that_says_nothing(hosts):
  start = time.monotonic()
  hosts[1].process.send_signal(signal.SIGSTOP)
  assert "process 1 of 3 is out of reach" in hosts[0].said()
  assert 0.5 * HEARTBEAT < time.monotonic() - start < 2 * HEARTBEAT


def test_nothing_is_said_of_a_run_that_ends(hosts):
  for i in (0, 2, 1):
    hosts[i].end.done()
    time.sleep(0.2)
    hosts[i].process.stdin.close()
  assert [host.said() for host in hosts] == ["", "", ""]


def test_none_stays_where_nobody_listens(hosts):
  for host in hosts:
    host.process.stderr.close()
  hosts[1].process.stdin.close()
  for host in hosts:
    assert host.process.wait(10) is not None


def test_who_is_done_first_still_watches(hosts):
  hosts[0].end.done()
  hosts[0].process.stdin.close()
  time.sleep(0.2)
  hosts[2].process.stdin.close()
  for host in hosts:
    assert "process 2 of 3 ended" in host.said()


def test_signals_are_for_the_process(hosts):
  """It saves its state first, and its companion waits for it."""
  for host in hosts:
    host.process.send_signal(signal.SIGTERM)
    host.process.send_signal(signal.SIGINT)
  time.sleep(0.3)
  assert [host.process.poll() for host in hosts] == [None, None, None]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_without_a_launcher(tmp_path, victim):
  """Each host starts its own process of the ordinary main."""
  tiny_run.write_data(tmp_path)
  workdir, heartbeat = tmp_path / "run", 6
  workdir.mkdir()
  with socket.create_server(("localhost", 0)) as free:
    port = free.getsockname()[1]
  logs = [workdir / f"log.{i}.txt" for i in range(2)]
  processes = []
  for i, path in enumerate(logs):
    settings = {
      "coordinator": f"localhost:{port}",
      "num_processes": 2,
      "process_id": i,
      "heartbeat_seconds": heartbeat,
    }
    settings = [f"distributed.{k}={v}" for k, v in settings.items()]
    with path.open("w") as log:
      processes.append(
        subprocess.Popen(
          hosts_run.command(tmp_path, workdir, *settings),
          cwd=hosts_run.ROOT,
          env=hosts_run.environment(f"{victim}:6:{signal.SIGKILL.value}"),
          stdout=log,
          stderr=log,
        )
      )
  codes = [process.wait(300) for process in processes]
  assert hosts_run.seconds_since_signal(workdir) < 2 * heartbeat
  assert codes[victim] == -signal.SIGKILL and codes[1 - victim] != 0
  time.sleep(1)  # Companions end after their processes.
  for path in logs:
    log = path.read_text()
    assert f"process {victim} of 2 ended before the run did" in log
    assert f"resumes from {workdir}/checkpoints/4" in log
