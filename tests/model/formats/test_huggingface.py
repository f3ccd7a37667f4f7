import json

import jax
import ml_dtypes
import numpy as np
import pytest

from model.families import registry
from model.formats import huggingface, weights_map
from tests.model.families.test_parity import config_of
from tests.oracles import family_cases
from tests.oracles.named_checkpoint import NamedCheckpoint


def family_of(case):
  return registry.find(family_cases.CONFIGS[case]["model_type"])


def model_of(case):
  source = NamedCheckpoint(case)
  return weights_map.load(config_of(case), family_of(case).names, source)


def exported(case, folder, **kwargs):
  model = model_of(case)
  family = family_of(case).model_type
  huggingface.export(model, folder, family=family, **kwargs)
  return model


def assert_same(a, b, dtype=np.float32):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(
      x, np.asarray(y).astype(dtype).astype(np.float32)
    )


@pytest.mark.parametrize("case", family_cases.CONFIGS)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_export_reads_back_bitwise(tmp_path, case, max_shard_bytes):
  folder = tmp_path / "out"
  model = exported(case, folder, max_shard_bytes=max_shard_bytes)
  sharded = (folder / "model.safetensors.index.json").exists()
  assert sharded == (max_shard_bytes == 20_000)
  family, config = huggingface.load_config(folder)
  assert family is family_of(case)
  assert config.layer_kinds == model.config.layer_kinds
  assert_same(huggingface.load(folder), model)


def test_bfloat16_rounds_once(tmp_path):
  model = exported("llama3", tmp_path / "out", dtype="bfloat16")
  assert_same(huggingface.load(tmp_path / "out"), model, ml_dtypes.bfloat16)


def test_config_says_what_transformers_needs(tmp_path):
  exported("gemma2", tmp_path / "out", token_ids={"eos_token_id": 7})
  values = json.loads((tmp_path / "out/config.json").read_text())
  wanted = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "torch_dtype": "float32",
    "eos_token_id": 7,
    "bos_token_id": None,
    "head_dim": 10,
    "query_pre_attn_scalar": 5,
  }
  assert {k: values[k] for k in wanted} == wanted


def test_tokenizer_files_are_copied(tmp_path):
  source = tmp_path / "tokenizer"
  source.mkdir()
  for name in ("tokenizer.json", "chat_template.jinja", "weights.bin"):
    (source / name).write_text(name)
  exported("llama2", tmp_path / "out", tokenizer=source)
  copied = {p.name for p in (tmp_path / "out").iterdir()}
  assert {"tokenizer.json", "chat_template.jinja"} < copied
  assert "weights.bin" not in copied


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
  def fail(*args, **kwargs):
    raise OSError("disk full")

  monkeypatch.setattr(huggingface.safetensors, "write", fail)
  with pytest.raises(OSError, match="disk full"):
    exported("llama2", tmp_path / "out")
  assert not (tmp_path / "out").exists()
  monkeypatch.undo()
  exported("llama2", tmp_path / "out")  # what was left does not disturb
  assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_existing_folder_is_kept(tmp_path):
  with pytest.raises(FileExistsError, match="choose another"):
    exported("llama2", tmp_path)


def test_a_family_that_cannot_say_it_is_refused(tmp_path):
  model = model_of("gemma2")
  with pytest.raises(ValueError) as error:
    huggingface.export(model, tmp_path / "out", family="llama")
  for name in ("attention_softcap", "norm_placement", "layer_pattern"):
    assert f"model.{name}=" in str(error.value)
  assert not (tmp_path / "out").exists()


def test_tied_head_may_be_stored_if_it_is_the_table(tmp_path):
  folder = tmp_path / "out"
  model = exported("smollm2", folder)
  file = folder / "model.safetensors"
  tensors = dict(
    weights_map.tensors(model, family_of("smollm2").names, "float32")
  )
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
  frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
  tensors[frequencies] = np.ones(3, np.float32)
  file.unlink()
  huggingface.safetensors.write(folder, tensors.items(), max_shard_bytes=10**9)
  assert_same(huggingface.load(folder), model)

  tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
  file.unlink()
  huggingface.safetensors.write(folder, tensors.items(), max_shard_bytes=10**9)
  with pytest.raises(ValueError, match="tie_word_embeddings is true but"):
    huggingface.load(folder)


def test_no_config_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="config.json is not there"):
    huggingface.load(tmp_path)
