"""What a model cannot be, said so that a newcomer can act on it."""

import dataclasses

import pytest

from model.config import Rope
from tests.model.tiny import CONFIG, MOE


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_layers": 0}, "model.num_layers must be at least 1, got 0"),
    ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of"),
    ({"layer_pattern": ()}, "layer_pattern must name at least one kind"),
    ({"layer_pattern": ("local",)}, "set model.window"),
    ({"head_dim": 5}, "even model.head_dim, got 5"),
    ({"norm_bias": True}, "needs model.norm='layer'"),
    ({"embed_dropout": 1.0}, r"embed_dropout must be in \[0, 1\), got 1.0"),
    ({"attention_dropout": -0.1}, "attention_dropout must be in"),
    ({"window": 0, "layer_pattern": ("local",)}, "at least 1, got 0"),
    ({"activation": "swish"}, r"activation must be one of .*, got 'swish'"),
    ({"layer_pattern": ("sliding",), "window": 3}, "made of 'global' and"),
    ({"norm": "batch"}, "norm must be one of .*'rms', 'layer'"),
    ({"norm_placement": "before"}, "norm_placement must be one of"),
    ({"moe": MOE, "mlp_bias": True}, "experts have no bias; set it to False"),
  ],
  ids=str,
)
def test_refuses(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_active": 0}, "num_active must be between 1 and .*=7, got 0"),
    ({"num_active": 8}, "num_active must be between 1 and .*=7, got 8"),
    ({"num_shared": -1}, "num_shared must be at least 0, got -1"),
    ({"scores": "tanh"}, "moe.scores must be one of .*, got 'tanh'"),
    ({"capacity_factor": 0.0}, "above 0, or None for no limit; got 0.0"),
    ({"balance_loss": -0.1}, "balance_loss must be at least 0, got -0.1"),
    ({"z_loss": -0.1}, "z_loss must be at least 0, got -0.1"),
    ({"bias_rate": -0.1}, "bias_rate must be at least 0, got -0.1"),
  ],
  ids=str,
)
def test_refuses_experts(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(MOE, **change)


def test_refuses_unknown_scaling():
  with pytest.raises(ValueError, match="rope.scaling must be one of .*'yarn'"):
    Rope(theta=1e4, scaling="ntk")


def test_layer_pattern_repeats_and_is_cut_off():
  config = dataclasses.replace(
    CONFIG, num_layers=5, window=3, layer_pattern=("local", "local", "global")
  )
  assert config.layer_kinds == ("local", "local", "global", "local", "local")


def test_odd_heads_are_fine_without_rotary_embedding():
  assert dataclasses.replace(CONFIG, head_dim=5, rope=None).head_dim == 5
