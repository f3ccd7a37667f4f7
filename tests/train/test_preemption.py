"""SIGTERM raises a flag while it is caught, and nothing else changes."""

import os
import signal
import threading

import pytest

from train import preemption


def test_only_the_flag_changes():
  before = signal.getsignal(signal.SIGTERM)
  with preemption.catch_sigterm() as stop:
    assert not stop(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop(1) and stop(2)
  assert signal.getsignal(signal.SIGTERM) == before


def test_the_handler_is_put_back_after_an_error():
  before = signal.getsignal(signal.SIGTERM)
  with pytest.raises(KeyError), preemption.catch_sigterm():
    raise KeyError
  assert signal.getsignal(signal.SIGTERM) == before


def test_other_threads_are_not_asked_to_stop():
  found = []

  def run():
    with preemption.catch_sigterm() as stop:
      found.append(stop(1))

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert found == [False]


def test_a_shell_sees_a_run_that_did_not_end():
  error = preemption.Preempted("saved")
  assert error.code == 143 and str(error) == "saved"
