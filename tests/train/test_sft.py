"""Fine-tuning: where it starts, and that only answers are learnt."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from data import tokenized, tokenizer
from data.config import DataConfig, TokenSource
from data.loader import open_loader
from model.formats import huggingface
from model.transformer import Transformer
from sharding.axes import MeshConfig
from tests.tolerances import tolerance
from tests.train import hosts_run, tiny_run
from train import monitor, pretrain, sft
from train.config import (
  MonitorConfig,
  OptimizerConfig,
  ScheduleConfig,
  StepConfig,
)
from train.run_config import HeldOutConfig, SFTConfig

# One worker: the runs that the tests share are not run twice.
pytestmark = pytest.mark.xdist_group("train_sft")

_RTOL, _ATOL = tolerance("loss").values()
APPROX = {"rel": _RTOL, "abs": _ATOL}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A tokenizer, and a store of prompts and answers, the answers masked in."""
  folder = tmp_path_factory.mktemp("data")
  tiny_run.write_data(folder)
  tok = tokenizer.load(folder / "tokenizer.model")
  examples = []
  for i in range(30):
    prompt = tok.encode(f"what is {i % 7}?", bos=True)
    answer = tok.encode(f" it is {i % 7}" * (1 + i % 2), eos=True)
    mask = [0] * len(prompt) + [1] * len(answer)
    examples.append(tokenized.Example(f"chat-{i}", prompt + answer, mask))
  for name, part in {
    "chat": examples[:24],
    "chat_held_out": examples[24:],
  }.items():
    tokenized.write(
      folder / name,
      part,
      vocab_size=tok.vocab_size,
      fingerprint=tok.fingerprint,
    )
  return folder


@pytest.fixture
def config(folder):
  return SFTConfig(
    init_from="nowhere",
    data=DataConfig(
      sources=(TokenSource(path=str(folder / "chat")),),
      tokenizer=str(folder / "tokenizer.model"),
      seq_len=40,
      global_batch_size=4,
      overlong="drop",
    ),
    num_epochs=4,
    held_out=HeldOutConfig(path=str(folder / "chat_held_out")),
    mesh=MeshConfig(data=2, fsdp=1),
    schedule=ScheduleConfig(peak=1e-2, warmup_steps=1),
    step=StepConfig(precision="float32"),
    monitor=MonitorConfig(log_every=1, eval_every=100, tensorboard=False),
    compilation_cache=str(folder / "compiled"),
  )


@pytest.fixture(scope="module")
def model(folder):
  """Of the tiny run, without its dropout."""
  config = tiny_run.config(folder).model
  config = dataclasses.replace(config, residual_dropout=0.0)
  return Transformer(config, rngs=nnx.Rngs(3))


def test_the_loss_is_that_of_the_answers_and_falls(config, model, tmp_path):
  result = sft.run(config, str(tmp_path), model=model)
  loader = open_loader(config.data, tokenizer.load(config.data.tokenizer))
  batch, _ = loader.batch(0)
  hidden = model(
    batch["tokens"],
    positions=batch["positions"],
    segment_ids=batch["segment_ids"],
  )
  log_probs = np.asarray(jax.nn.log_softmax(model.logits(hidden)))
  picked = np.take_along_axis(log_probs, batch["targets"][..., None], -1)[
    ..., 0
  ]
  weights = batch["loss_weights"]
  # Prompts are tokens too, but have no weight.
  assert 0 < weights.sum() < 0.8 * np.count_nonzero(batch["segment_ids"])
  first, last = result.history[0], result.history[-1]
  wanted = -(picked * weights).sum() / weights.sum()
  assert first["loss"] == pytest.approx(wanted, **APPROX)
  assert first["weight_sum"] == weights.sum()
  assert first["tokens"] == np.count_nonzero(batch["segment_ids"])
  # Four passes over the rows, as near as whole batches come.
  assert last["step"] == round(4 * loader.num_rows[0] / 4)
  assert last["held_out_loss"] < first["loss"] - 1.0
  assert "held_out_bits_per_byte" not in last


def test_starts_from_runs_and_hugging_face_folders(config, model, tmp_path):
  start = dataclasses.replace(config, num_steps=1)
  loss = lambda config, name, **kwargs: sft.run(
    config, str(tmp_path / name), **kwargs
  ).history[0]["loss"]
  wanted = loss(start, "given", model=model)
  # The weights that were given are still there.
  assert loss(start, "again", model=model) == wanted

  huggingface.export(model, tmp_path / "exported", family="llama")
  exported = dataclasses.replace(start, init_from=str(tmp_path / "exported"))
  assert loss(exported, "hf") == pytest.approx(wanted, **APPROX)

  # A fine-tuned run is itself a start.
  chained = dataclasses.replace(start, init_from=str(tmp_path / "given"))
  assert loss(chained, "chained") < wanted


def test_pretrained_run_to_sft(config, folder, tmp_path):
  base = dataclasses.replace(tiny_run.config(folder), num_steps=3)
  pretrain.run(base, str(tmp_path / "base"))
  config = dataclasses.replace(
    config, init_from=str(tmp_path / "base"), num_steps=2
  )
  result = sft.run(config, str(tmp_path / "sft"))
  assert int(result.state.step) == 2
  assert result.state.model.config == base.model


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"data.seq_len": "65"}, r"data\.seq_len=65 .*max_positions=64"),
    ({"num_epochs": "0"}, "num_epochs must be at least 1"),
    ({"mesh.data": "3"}, r"mesh\.data=3"),
  ],
)
def test_bad_settings_are_refused(config, model, tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    sft.run(sft.cli.override(config, change), str(tmp_path), model=model)


def test_no_such_start(config, tmp_path):
  with pytest.raises(ValueError, match="'nowhere' .* does not exist"):
    sft.run(config, str(tmp_path))


def test_another_vocabulary(config, model, tmp_path):
  small = Transformer(
    dataclasses.replace(model.config, vocab_size=300), rngs=nnx.Rngs(0)
  )
  with pytest.raises(ValueError, match=r"320 tokens .*vocab_size=300"):
    sft.run(config, str(tmp_path), model=small)


@pytest.mark.slow
def test_two_processes(config, model, tmp_path):
  """As one, from the weights of a Hugging Face folder."""
  huggingface.export(model, tmp_path / "start", family="llama")
  config = dataclasses.replace(
    config,
    init_from=str(tmp_path / "start"),
    mesh=MeshConfig(data=2, fsdp=2),
    optimizer=OptimizerConfig(eps=1e-4),
  )
  command = hosts_run.command_of("train.sft", config, tmp_path / "two")
  hosts_run.launch(command, num_processes=2)
  one = sft.run(config, str(tmp_path / "one"))
  lines = monitor.read(tmp_path / "two" / "metrics.jsonl")
  rtol = tolerance("mesh")["rtol"]
  for line, other in zip(lines, one.history, strict=True):
    assert line["tokens"] == other["tokens"]
    np.testing.assert_allclose(line["loss"], other["loss"], rtol=rtol)
