"""config.json in and out, and presets against the published models."""

import dataclasses
import math

import jax
import pytest
from flax import nnx

from model.config import Rope
from model.families import (
  gemma2,
  gemma3,
  llama,
  mistral,
  mixtral,
  qwen2,
  qwen3,
  qwen3_moe,
  registry,
)
from model.transformer import Transformer
from tests.oracles import family_cases

# Parameters as the model cards' safetensors count them.
PUBLISHED = {
  llama.llama2_7b: 6_738_415_616,
  llama.llama2_13b: 13_015_864_320,
  llama.llama2_70b: 68_976_648_192,
  llama.llama3_8b: 8_030_261_248,
  llama.llama3_70b: 70_553_706_496,
  llama.llama3_1_8b: 8_030_261_248,
  llama.llama3_1_70b: 70_553_706_496,
  llama.llama3_1_405b: 405_853_388_800,
  llama.llama3_2_1b: 1_235_814_400,
  llama.llama3_2_3b: 3_212_749_824,
  llama.smollm2_135m: 134_515_008,
  llama.smollm2_360m: 361_821_120,
  llama.smollm2_1_7b: 1_711_376_384,
  mistral.mistral_7b_v01: 7_241_732_096,
  mistral.mistral_7b_v02: 7_241_732_096,
  mistral.mistral_7b_v03: 7_248_023_552,
  qwen2.qwen2_0_5b: 494_032_768,
  qwen2.qwen2_1_5b: 1_543_714_304,
  qwen2.qwen2_7b: 7_615_616_512,
  qwen2.qwen2_72b: 72_706_203_648,
  qwen3.qwen3_0_6b: 596_049_920,
  qwen3.qwen3_1_7b: 1_720_574_976,
  qwen3.qwen3_4b: 4_022_468_096,
  qwen3.qwen3_8b: 8_190_735_360,
  qwen3.qwen3_14b: 14_768_307_200,
  qwen3.qwen3_32b: 32_762_123_264,
  mixtral.mixtral_8x7b: 46_702_792_704,
  mixtral.mixtral_8x22b: 140_620_634_112,
  qwen3_moe.qwen3_30b_a3b: 30_532_122_624,
  qwen3_moe.qwen3_235b_a22b: 235_093_634_560,
  gemma2.gemma2_2b: 2_614_341_888,
  gemma2.gemma2_9b: 9_241_705_984,
  gemma2.gemma2_27b: 27_227_128_320,
  gemma3.gemma3_270m: 268_098_176,
  gemma3.gemma3_1b: 999_885_952,
  # The text part of a model with images.
  gemma3.gemma3_4b: 3_880_263_168,
  gemma3.gemma3_12b: 11_766_034_176,
  gemma3.gemma3_27b: 27_009_346_304,
}
MODULES = llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gemma2, gemma3
FAMILY_OF = {
  preset: registry.FAMILIES[module.FAMILY.model_type]
  for module in MODULES
  for preset in PUBLISHED
  if preset.__module__ == module.__name__
}


def case(name):
  values = family_cases.CONFIGS[name]
  return registry.find(values["model_type"]), values


@pytest.mark.parametrize("preset", PUBLISHED, ids=lambda f: f.__name__)
def test_presets_have_the_published_parameters(preset):
  config = preset()
  model = jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))
  assert count == PUBLISHED[preset]


@pytest.mark.parametrize("preset", PUBLISHED, ids=lambda f: f.__name__)
def test_presets_are_of_their_family(preset):
  family, config = FAMILY_OF[preset], preset()
  assert family.config(family.config_json(config)) == config


@pytest.mark.parametrize("name", family_cases.CONFIGS)
def test_written_config_means_the_same(name):
  family, values = case(name)
  config = family.config(values)
  again = family.config(family.config_json(config))
  assert config.layer_kinds == again.layer_kinds
  same = {"layer_pattern": config.layer_pattern}
  assert dataclasses.replace(again, **same) == config


def test_gemma_patterns_start_local():
  kinds = gemma2.gemma2_2b().layer_kinds
  assert kinds[:4] == ("local", "global", "local", "global")
  kinds = gemma3.gemma3_1b().layer_kinds
  assert kinds[:7] == ("local",) * 5 + ("global", "local")


@pytest.mark.parametrize(
  ("name", "field", "match"),
  [
    ("llama2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ("llama2", {"rope_interleaved": True}, "rope_interleaved=True"),
    ("llama2", {"num_local_experts": 8}, "does not know: num_local_experts=8"),
    ("llama2", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama2", {"vocab_size": None}, "'vocab_size' is missing or null"),
    (
      "llama2",
      {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
      "rope_type='dynamic' is not supported",
    ),
    (
      "llama2",
      {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}},
      "does not know: beta=1",
    ),
    (
      "qwen2",
      {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}},
      "does not know: mscale=0.7",
    ),
    (
      "llama2",
      {"partial_rotary_factor": 0.5},
      "does not know: partial_rotary_factor=0.5",
    ),
    ("mistral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    (
      "qwen3",
      {"layer_types": ["full_attention", "sliding_attention"]},
      "layer_types=",
    ),
    ("qwen3", {"head_dim": None}, "'head_dim' is missing or null"),
    (
      "qwen3",
      {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
      "'rope_theta' is missing or null",
    ),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("mixtral", {"num_local_experts": None}, "'num_local_experts' is missing"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not"),
    ("qwen3_moe", {"norm_topk_prob": None}, "'norm_topk_prob' is missing"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "does not know"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    (
      "gemma2",
      {"use_bidirectional_attention": True},
      "use_bidirectional_attention=True",
    ),
    (
      "gemma2",
      {"layer_types": ["linear_attention"] * 3},
      r"unknown: \['linear_attention'\]",
    ),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma3", {"rope_local_base_freq": None}, "'rope_local_base_freq'"),
  ],
)
def test_what_is_not_understood_is_refused(name, field, match):
  family, values = case(name)
  with pytest.raises(ValueError, match=match):
    family.config(values | field)


@pytest.mark.parametrize(
  ("name", "field"),
  [
    ("mistral", "sliding_window"),
    ("gemma2", "attn_logit_softcapping"),
    ("gemma2", "final_logit_softcapping"),
    ("qwen3", "rope_parameters"),
  ],
)
def test_absent_fields_are_not_guessed(name, field):
  family, values = case(name)
  values = {k: v for k, v in values.items() if k != field}
  with pytest.raises(ValueError, match="missing"):
    family.config(values)


def test_null_means_none_where_it_may():
  family, values = case("mistral")
  config = family.config(values | {"sliding_window": None})
  assert (config.window, config.layer_kinds) == (None, ("global",) * 2)
  family, values = case("gemma2")
  config = family.config(values | {"attn_logit_softcapping": None})
  assert config.attention_softcap is None


def test_both_spellings_of_rotary_embeddings_agree():
  family, values = case("gemma3")
  old = family.config(values)
  for name in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
    values = {k: v for k, v in values.items() if k != name}
  new = family.config(values | {
    "rope_parameters": {
      "full_attention": {
        "rope_type": "linear", "rope_theta": 1e6, "factor": 8.0,
      },
      "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
  })  # fmt: skip
  assert new == old
  assert old.rope == Rope(theta=1e6, scaling="linear", factor=8.0)
  assert old.rope_local == Rope(theta=100.0)


def test_unknown_family_shows_the_nearest():
  with pytest.raises(ValueError, match=r"'qwen4'; did you mean .*'qwen3'"):
    registry.find("qwen4")
  with pytest.raises(ValueError, match="saved as its text model"):
    registry.find("gemma3")


def test_a_model_beyond_the_family_is_refused():
  family, values = case("llama2")
  config = family.config(values)
  for change in (
    {"qk_norm": True},
    {"out_bias": True},
    {"embed_scale": 2.0},
    {"activation": "relu2"},
    {"norm": "layer"},
    {"window": 7, "layer_pattern": ("local", "global")},
    {"rope": None},
  ):
    with pytest.raises(ValueError, match=f"model.{next(iter(change))}"):
      family.config_json(dataclasses.replace(config, **change))


def test_what_a_family_with_experts_cannot_say_is_refused():
  family, values = case("mixtral")
  config = family.config(values)
  for change in (
    {"num_shared": 1},
    {"scores": "sigmoid"},
    {"normalize": False},
    {"scale": 2.0},
    {"bias_rate": 0.1},
    {"capacity_factor": 1.0},
  ):
    moe = dataclasses.replace(config.moe, **change)
    with pytest.raises(ValueError, match=f"model.moe=.*{next(iter(change))}"):
      family.config_json(dataclasses.replace(config, moe=moe))
  # Losses are of training alone.
  moe = dataclasses.replace(config.moe, balance_loss=0.1, z_loss=0.1)
  trained = dataclasses.replace(config, moe=moe)
  assert family.config_json(trained) == family.config_json(config)
  with pytest.raises(ValueError, match="model.moe is None"):
    family.config_json(dataclasses.replace(config, moe=None))
  with pytest.raises(ValueError, match="cannot express this model: model.moe="):
    case("mistral")[0].config_json(config)


def test_the_name_of_transformers_5_for_the_number_of_experts():
  family, values = case("qwen3_moe")
  renamed = dict(values)
  renamed["num_local_experts"] = renamed.pop("num_experts")
  assert family.config(renamed) == family.config(values)
