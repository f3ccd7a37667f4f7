"""What is not finite stops a run, and says where to look."""

import json
import types

import pytest

from train import guard


def saver(newest):
  return types.SimpleNamespace(newest=lambda: newest)


FINE = {"loss": 2.0, "grad_norm": 1.0, "param_norm": 3.0, "learning_rate": 0.1}


def test_finite_passes(tmp_path):
  guard.check(3, FINE, [["a"]], workdir=tmp_path, saver=saver(None))
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["loss", "grad_norm", "param_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_each_is_watched(tmp_path, name, value):
  with pytest.raises(guard.NonFiniteError, match=f"Step 3: {name} is"):
    guard.check(
      3, FINE | {name: value}, [["a"]], workdir=tmp_path, saver=saver(None)
    )


def test_names_documents_and_checkpoint(tmp_path):
  rows = [[f"doc-{i}", f"doc-{i + 1}"] for i in range(20)]
  with pytest.raises(guard.NonFiniteError) as error:
    guard.check(
      7,
      FINE | {"loss": float("nan")},
      rows,
      workdir=tmp_path,
      saver=saver("runs/x/checkpoints/5"),
    )
  text = str(error.value)
  assert "doc-0, doc-1, doc-2" in text and "and 11 more" in text
  assert "last good checkpoint is runs/x/checkpoints/5" in text
  assert "schedule.peak" in text
  report = json.loads((tmp_path / "nonfinite.json").read_text())
  assert report["document_ids"] == rows
  assert report["metrics"]["loss"] == "nan"
  with pytest.raises(guard.NonFiniteError, match="no checkpoint yet"):
    guard.check(
      1, {"loss": float("nan")}, rows, workdir=tmp_path, saver=saver(None)
    )


def test_each_process_names_its_own_documents(tmp_path, monkeypatch):
  monkeypatch.setattr("jax.process_index", lambda: 2)
  bad = FINE | {"loss": float("nan")}
  with pytest.raises(guard.NonFiniteError, match=r"nonfinite\.2\.json"):
    guard.check(3, bad, [["a"]], workdir=tmp_path, saver=saver(None))
  report = json.loads((tmp_path / "nonfinite.2.json").read_text())
  assert report["document_ids"] == [["a"]]
