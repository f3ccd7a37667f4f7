"""Tells who died, on every host of a run of several processes.

Where a process of a run dies, JAX ends the others within a heartbeat, by
abort() from C++: no Python of theirs is asked, and nobody is named. So each
process has a companion, a small process that learns from a pipe how the other
ends. Companions know each other by sockets, in a star around that of process
0, and each says who was the first to die and where the run goes on.

Companions only tell. Started by `start`, never by hand; imports no JAX.
"""

import asyncio
import contextlib
import ipaddress
import pathlib
import signal
import socket
import subprocess
import sys

from train import checkpoint

# What processes tell their companions, and companions each other, by line.
_BEAT, _DONE, _DIED, _LOST, _FOLDER = "beat", "done", "died", "lost", "folder"
_HOW = {
  _DIED: "ended before the run did",
  _LOST: "is out of reach, with its machine",
}


class Companion:
  """This process's end of the pipe."""

  def __init__(self, pipe):
    self._pipe = pipe

  def saves_to(self, checkpoints: pathlib.Path) -> None:
    """Tells where the run goes on, should it end."""
    self._tell(f"{_FOLDER} {checkpoints}")

  def done(self) -> None:
    """Tells that this process does not need the others any more."""
    self._tell(_DONE)

  def _tell(self, line: str) -> None:
    try:
      self._pipe.write(f"{line}\n".encode())
      self._pipe.flush()
    except BrokenPipeError:
      pass  # A run is not worse for a companion that is gone.


def start(host: str, *, heartbeat_seconds: int) -> Companion:
  """Starts this process's companion. All processes call it, together.

  Args:
    host: of process 0.
    heartbeat_seconds: who says nothing for so long is taken to be dead.
  """
  import jax
  import numpy as np
  from jax.experimental import multihost_utils

  listener = listen(host) if jax.process_index() == 0 else None
  port = listener.getsockname()[1] if listener else 0
  port = int(multihost_utils.broadcast_one_to_all(np.int32(port)))
  files = [listener.fileno()] if listener else []
  arguments = [jax.process_index(), jax.process_count(), heartbeat_seconds]
  child = subprocess.Popen(
    [sys.executable, "-m", "train.watchdog"]
    + [str(argument) for argument in (*arguments, host, port, *files)],
    cwd=pathlib.Path(__file__).parents[1],
    stdin=subprocess.PIPE,
    pass_fds=files,
  )
  if listener:
    listener.close()
  return Companion(child.stdin)


def listen(host: str) -> socket.socket:
  """Opens the socket that companions come to, on a port of its own.

  Args:
    host: of process 0, as the others call it. Who calls it "localhost", or by
      a loopback address, has all processes on one machine, and no other can
      connect. A name says no more: many machines know their own by 127.0.1.1.
  """
  is_local = host == "localhost"
  with contextlib.suppress(ValueError):
    is_local |= ipaddress.ip_address(host).is_loopback
  if is_local:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)
  is_dual = socket.has_dualstack_ipv6()
  return socket.create_server(
    ("", 0),
    family=socket.AF_INET6 if is_dual else socket.AF_INET,
    dualstack_ipv6=is_dual,
  )


def resume_hint(checkpoints: pathlib.Path | None) -> str:
  """Where the run goes on, in a sentence."""
  path = checkpoint.newest(checkpoints) if checkpoints else None
  if path is None:
    return "There is no checkpoint yet: started again, the run begins anew."
  return f"Started again with the same workdir, the run resumes from {path}."


class _Watch:
  """What a companion knows; `run` returns when it has nothing more to tell."""

  def __init__(self, process_id: int, num_processes: int, heartbeat: float):
    self._id = process_id
    self._others = set(range(num_processes)) - {process_id}
    self._num_processes = num_processes
    self._heartbeat = heartbeat
    self._folder: pathlib.Path | None = None
    self._done: set[int] = set()
    self._peers: list[asyncio.StreamWriter] = []
    self._ended = asyncio.Event()

  async def run(self, host: str, port: int, listener: int | None) -> None:
    """Watches until all are done, or one is dead."""
    if listener is None:
      try:
        reader, writer = await asyncio.open_connection(host, port)
      except OSError as error:
        self._say(f"cannot reach process 0 by {host}:{port}: {error}")
        return
      writer.write(f"{self._id}\n".encode())
      peers = self._follow(0, reader, writer)
    else:
      server = await asyncio.start_server(
        self._greet, sock=socket.socket(fileno=listener)
      )
      peers = server.serve_forever()
    tasks = [
      asyncio.create_task(task)
      for task in (peers, self._follow_process(), self._beat())
    ]
    await self._ended.wait()
    for task in tasks:
      task.cancel()
    for writer in self._peers:
      with contextlib.suppress(ConnectionError):
        await writer.drain()

  async def _follow_process(self) -> None:
    """Reads the pipe from the own process, to its end."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
      lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async for line in reader:
      word, _, rest = line.decode().strip().partition(" ")
      if word == _FOLDER:
        self._folder = pathlib.Path(rest)
      elif word == _DONE:
        self._tell(f"{_DONE} {self._id}")
        self._finish(self._id)
    if self._id in self._done:
      return
    if self._id == 0 or not self._peers:
      self._mourn(self._id, _DIED)
    else:  # Another may have died before: the center knows the first.
      self._tell(f"{_DIED} {self._id}")

  async def _greet(self, reader, writer) -> None:
    """At the center: another companion comes."""
    who = int(await reader.readline() or -1)
    if who in self._others:
      if len(self._peers) + 1 == len(self._others):
        self._say(f"watches over {self._num_processes} processes.")
      with contextlib.suppress(asyncio.CancelledError):  # Nothing more to hear.
        await self._follow(who, reader, writer)

  async def _follow(self, who: int, reader, writer) -> None:
    """Listens to the companion of process `who`."""
    self._peers.append(writer)
    while True:
      try:
        line = await asyncio.wait_for(reader.readline(), self._heartbeat)
      except (TimeoutError, ConnectionError):
        line = b""
      word, _, number = line.decode().strip().partition(" ")
      if word == _DONE:
        self._finish(int(number))
      elif word in _HOW:
        self._mourn(int(number), word)
      elif word != _BEAT:  # Nothing was said, or nobody is there any more.
        self._peers.remove(writer)
        if who not in self._done:
          self._mourn(who, _LOST)
        return

  async def _beat(self) -> None:
    while True:
      self._tell(_BEAT)
      await asyncio.sleep(self._heartbeat / 3)

  def _tell(self, line: str) -> None:
    for writer in self._peers:
      writer.write(f"{line}\n".encode())

  def _finish(self, who: int) -> None:
    """A process is done; the center stays until all are."""
    self._done.add(who)
    if self._others < self._done if self._id == 0 else self._id == who:
      self._ended.set()

  def _mourn(self, who: int, how: str) -> None:
    """Says who died and how; the first one only. The center tells all."""
    if self._ended.is_set():
      return
    self._ended.set()
    if self._id == 0:
      self._tell(f"{how} {who}")
    self._say(f"process {who} of {self._num_processes} {_HOW[how]}.")
    self._say("The others end as well. " + resume_hint(self._folder))

  def _say(self, text: str) -> None:
    with contextlib.suppress(OSError):  # Whoever listened may be gone as well.
      print(f"[watchdog {self._id}] {text}", file=sys.stderr, flush=True)


def main(process_id, num_processes, heartbeat, host, port, listener=None):
  """What a companion does."""
  # It ends when its process has ended, not when both are told to.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)

  async def watch():
    companion = _Watch(int(process_id), int(num_processes), float(heartbeat))
    await companion.run(host, int(port), listener and int(listener))

  asyncio.run(watch())


if __name__ == "__main__":
  if len(sys.argv) < 6:
    sys.exit(__doc__)
  main(*sys.argv[1:])
