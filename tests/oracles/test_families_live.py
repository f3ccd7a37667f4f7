"""Every family against transformers, run side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.families import registry
from model.formats import gguf, huggingface, safetensors
from model.transformer import Transformer
from tests.model.families.test_parity import config_of, logits, recorded
from tests.model.formats import gguf_files
from tests.model.formats.test_gguf import CASES as GGUF_CASES
from tests.model.formats.test_huggingface import exported, family_of
from tests.oracles import family_cases
from tests.oracles.named_checkpoint import NamedCheckpoint
from tests.tolerances import tolerance

pytestmark = [
  pytest.mark.oracle,
  # Of torch and transformers, about themselves.
  pytest.mark.filterwarnings("default"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from tests.oracles import transformers_oracle  # noqa: E402


def ours(model: Transformer, batch) -> np.ndarray:
  """Logits at real tokens."""
  hidden = jax.jit(type(model).__call__)(
    model,
    jnp.asarray(batch["tokens"]),
    positions=jnp.asarray(batch["positions"]),
    segment_ids=jnp.asarray(batch["mask"]),
  )
  return np.asarray(model.logits(hidden))[batch["mask"] == 1]


def loaded(folder, **kwargs):
  """What transformers makes of a folder, nothing left over or made up."""
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    folder,
    **transformers_oracle.PLAIN,
    dtype=torch.float32,
    output_loading_info=True,
    **kwargs,
  )
  assert not any(info.values()), info
  return model.eval()


@pytest.mark.parametrize("case", family_cases.CONFIGS)
def test_logits_equal(case):
  batch = family_cases.inputs(case)
  theirs = transformers_oracle.logits(transformers_oracle.build(case), batch)
  np.testing.assert_allclose(
    logits(case, config_of(case)), theirs, **tolerance("logits_parity")
  )
  # The recordings are of these very models and inputs.
  for name, value in batch.items():
    np.testing.assert_array_equal(recorded(case)[name], value)
  np.testing.assert_allclose(
    recorded(case)["logits"], theirs, **tolerance("logits_parity")
  )


@pytest.mark.parametrize("case", family_cases.CONFIGS)
def test_checkpoint_of_the_light_tests_is_theirs(tmp_path, case):
  transformers_oracle.build(case).save_pretrained(tmp_path)
  saved, source = safetensors.Checkpoint(tmp_path), NamedCheckpoint(case)
  assert saved.names() == source.names()
  for name in source.names():
    np.testing.assert_array_equal(saved.read(name), source.read(name))


@pytest.mark.parametrize("case", family_cases.CONFIGS)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_loads_what_we_export(tmp_path, case, max_shard_bytes):
  folder = tmp_path / "out"
  exported(case, folder, max_shard_bytes=max_shard_bytes)
  theirs = transformers_oracle.logits(loaded(folder), family_cases.inputs(case))
  expected = transformers_oracle.logits(
    transformers_oracle.build(case), family_cases.inputs(case)
  )
  np.testing.assert_array_equal(theirs, expected)


@pytest.mark.parametrize("case", family_cases.CONFIGS)
def test_we_load_what_transformers_saves(tmp_path, case):
  built = transformers_oracle.build(case)
  built.save_pretrained(tmp_path, max_shard_size="20KB")
  assert (tmp_path / "model.safetensors.index.json").exists()
  model = huggingface.load(tmp_path)
  batch = family_cases.inputs(case)
  np.testing.assert_allclose(
    ours(model, batch),
    transformers_oracle.logits(built, batch),
    **tolerance("logits_parity"),
  )


@pytest.mark.parametrize("case", GGUF_CASES)
def test_transformers_reads_the_same_weights_from_gguf(tmp_path, case):
  gguf_files.write(tmp_path / "m.gguf", case)
  model = gguf.load(gguf.open_file(tmp_path / "m.gguf"))
  values = family_of(case).config_json(model.config)
  # Their own reading of the metadata drops head sizes, windows and soft-caps.
  config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
  theirs = loaded(tmp_path, gguf_file="m.gguf", config=config)
  batch = family_cases.inputs(case)
  np.testing.assert_allclose(
    ours(model, batch),
    transformers_oracle.logits(theirs, batch),
    **tolerance("logits_parity"),
  )


@pytest.mark.parametrize("model_type", registry.FAMILIES)
def test_architecture_is_the_class_that_transformers_builds(model_type):
  config = transformers.AutoConfig.for_model(model_type)
  mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
  family = registry.FAMILIES[model_type]
  assert mapping[type(config)].__name__ == family.architecture
