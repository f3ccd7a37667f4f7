"""metrics.jsonl and TensorBoard hold each step once, one step late."""

import json
import math
import struct
import time

import jax.numpy as jnp
import pytest

from train import monitor
from train.config import MonitorConfig
from train.peak import Peak


def open_monitor(folder, *, start=0, log_every=2, check=None, **kwargs):
  config = MonitorConfig(log_every=log_every, tensorboard=False)
  return monitor.Monitor(
    folder,
    config=kwargs.pop("config", config),
    num_steps=kwargs.pop("num_steps", 20),
    start_step=start,
    check=check or (lambda *_: None),
    **kwargs,
  )


def record(m, step, *, loss=None, tokens=10, log=False):
  values = {"loss": jnp.float32(step if loss is None else loss)}
  m.record(step, values, tokens=tokens, document_ids=[[f"d{step}"]], log=log)


def lines(folder):
  return [
    json.loads(s) for s in (folder / monitor.FILE).read_text().splitlines()
  ]


def test_lines_are_the_first_every_nth_forced_and_last(tmp_path):
  m = open_monitor(tmp_path, num_steps=7, log_every=3)
  for step in range(1, 8):
    record(m, step, log=step == 5)
  m.flush()
  m.close()
  found = lines(tmp_path)
  assert [line["step"] for line in found] == [1, 3, 5, 6, 7]
  assert [line["loss"] for line in found] == [1, 3, 5, 6, 7]
  assert [line["tokens"] for line in found] == [10, 30, 50, 60, 70]
  assert m.history == found


def test_metrics_are_read_one_step_late(tmp_path):
  seen = []
  m = open_monitor(tmp_path, check=lambda step, *_: seen.append(step))
  for step in (1, 2, 3):
    record(m, step)
    assert seen == list(range(1, step))
  m.wait()
  assert seen == [1, 2, 3]
  m.close()


def test_the_check_sees_values_and_documents_and_stops_the_line(tmp_path):
  def check(step, metrics, document_ids):
    if math.isnan(metrics["loss"]):
      raise RuntimeError(f"{step} {document_ids}")

  m = open_monitor(tmp_path, log_every=1, check=check)
  record(m, 1)
  record(m, 2, loss=float("nan"))
  with pytest.raises(RuntimeError, match=r"2 \[\['d2'\]\]"):
    m.flush()
  m.close()
  assert [line["step"] for line in lines(tmp_path)] == [1]


def test_an_evaluation_joins_the_line_of_its_step(tmp_path):
  m = open_monitor(tmp_path)
  record(m, 1)
  record(m, 2)
  m.wait()
  m.add({"held_out_loss": 3.0})
  record(m, 3)
  m.add({"held_out_loss": 2.0})
  m.flush()
  m.close()
  found = lines(tmp_path)
  assert [line["step"] for line in found] == [1, 2, 3]
  assert found[1] | {"loss": 2.0, "held_out_loss": 3.0} == found[1]
  assert found[2] == {"step": 3, "held_out_loss": 2.0}


def test_a_restart_keeps_no_step_twice(tmp_path):
  m = open_monitor(tmp_path, log_every=1)
  for step in range(1, 6):
    record(m, step)
  m.flush()
  m.close()
  with (tmp_path / monitor.FILE).open("a") as file:
    file.write('{"step": 6, "lo')  # Killed while it wrote.
  m = open_monitor(tmp_path, start=3, log_every=1)
  assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
  record(m, 4, tokens=7)
  m.flush()
  m.close()
  found = lines(tmp_path)
  assert [line["step"] for line in found] == [1, 2, 3, 4]
  assert found[-1]["tokens"] == 37
  assert m.history == found


def test_throughput_and_utilisation(tmp_path, monkeypatch):
  clock = iter([10.0, 12.0, 16.0, 100.0, 101.0])
  monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
  m = open_monitor(
    tmp_path,
    log_every=1,
    flops=monitor.FlopsPerToken(exact=6.0, full=8.0, hardware=9.0),
    peak=Peak(100.0, "a table"),
  )
  for step in (1, 2, 3):
    record(m, step)
  m.wait()
  m.add({"held_out_loss": 1.0})  # At 100 s: it took 84 s, which do not count.
  record(m, 4)
  m.flush()
  m.close()
  first, second, third, fourth = lines(tmp_path)
  assert "tokens_per_second" not in first  # It was compiled meanwhile.
  assert second["tokens_per_second"] == 10 / 2
  assert third["tokens_per_second"] == 20 / 6
  assert third["step_seconds"] == 3.0
  assert fourth["tokens_per_second"] == 10.0
  assert fourth["mfu"] == pytest.approx(10 * 6 / 100)
  assert fourth["mfu_full"] == pytest.approx(10 * 8 / 100)
  assert fourth["hfu"] == pytest.approx(10 * 9 / 100)
  assert json.loads((tmp_path / "peak.json").read_text())["source"] == "a table"


def test_perplexity_is_that_of_the_likelihood(tmp_path):
  m = open_monitor(tmp_path)
  values = {"loss": jnp.float32(3.0), "nll": jnp.float32(2.0)}
  m.record(1, values, tokens=1, document_ids=[])
  m.flush()
  m.close()
  assert lines(tmp_path)[0]["ppl"] == pytest.approx(math.exp(2))


def test_tensorboard_events(tmp_path):
  from tensorboardX.proto import event_pb2

  m = open_monitor(tmp_path, config=MonitorConfig(log_every=1))
  record(m, 1)
  record(m, 2)
  m.flush()
  m.close()
  (path,) = tmp_path.glob("events.out.tfevents.*")
  data, found = path.read_bytes(), []
  while data:  # Length, its checksum, the event, its checksum.
    (size,) = struct.unpack("<Q", data[:8])
    event = event_pb2.Event.FromString(data[12 : 12 + size])
    found += [
      (value.tag, event.step, value.simple_value)
      for value in event.summary.value
      if value.tag == "loss"
    ]
    data = data[16 + size :]
  assert found == [("loss", 1, 1.0), ("loss", 2, 2.0)]


def test_the_bar_shows_loss_throughput_and_utilisation(tmp_path, capsys):
  m = open_monitor(
    tmp_path,
    num_steps=2,
    flops=monitor.FlopsPerToken(exact=6.0, full=8.0, hardware=9.0),
    peak=Peak(1e9, "a table"),
    label="pretrain",
  )
  record(m, 1)
  record(m, 2)
  m.wait()
  m.add({"held_out_loss": 3.25})
  m.flush()
  m.close()
  shown = capsys.readouterr().err
  assert "pretrain: 100%" in shown
  assert "loss 2, " in shown and " tokens/s, MFU " in shown
  assert "MFU is of a table." in shown
  assert "Step 2: held_out_loss 3.25" in shown


def test_host_time_of_a_step_is_below_two_milliseconds(tmp_path):
  m = open_monitor(tmp_path, num_steps=300, log_every=1)
  ready = {f"m{i}": jnp.float32(i) for i in range(9)} | {"loss": jnp.ones(())}
  seconds = []
  for step in range(1, 201):
    start = time.perf_counter()
    m.record(step, ready, tokens=1, document_ids=[])
    seconds.append(time.perf_counter() - start)
  m.close()
  # Half of what a whole step may take; the median, as machines are shared.
  assert sorted(seconds)[100] < 1e-3
