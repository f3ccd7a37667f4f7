"""Typed settings: text, JSON and Python say the same; mistakes are explained.

Oracle: Python's own constructors. Hypothesis draws nested configs, and each
way in must return an equal one.
"""

import dataclasses
import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.typed import check, from_dict, leaves, override, to_dict
from model.config import ModelConfig, Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  path: str
  weight: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  seed: int = 0
  ratio: float | None = None
  shuffle: bool = True
  policy: Literal["error", "skip"] = "skip"
  window: int | Literal["auto"] = "auto"
  betas: tuple[float, float] = (0.9, 0.95)
  names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  steps: int
  data: Data = Data()
  sources: tuple[Source, ...] = (Source(path="a"), Source(path="b"))
  rope: Rope | None = None

  def __post_init__(self):
    if self.data.seed > self.steps:
      raise ValueError("a rule across two fields")


_RUN = Run(steps=1, data=Data(seed=-9))
_INTS = st.integers(-(10**18), 10**18)
_FLOATS = st.floats(allow_nan=False)
_WORDS = st.text(st.characters(exclude_categories=["Cs"]))
_RUNS = st.builds(
  Run,
  steps=_INTS,
  data=st.builds(
    Data,
    seed=st.integers(-(10**19), -(10**18)),
    ratio=st.none() | _FLOATS,
    shuffle=st.booleans(),
    policy=st.sampled_from(["error", "skip"]),
    window=_INTS | st.just("auto"),
    betas=st.tuples(_FLOATS, _FLOATS),
    # On a command line commas separate and spaces around them do not count.
    names=st.lists(st.text("abc=.", min_size=1)).map(tuple),
  ),
  sources=st.lists(
    st.builds(Source, path=_WORDS, weight=_FLOATS), min_size=1, max_size=3
  ).map(tuple),
  rope=st.none() | st.builds(Rope, theta=_FLOATS, truncate=st.booleans()),
)


@given(_RUNS)
def test_json_round_trip(run):
  check(run)
  values = json.loads(json.dumps(to_dict(run)))
  assert from_dict(Run, values) == run


@given(_RUNS, _RUNS)
def test_text_turns_one_config_into_another(old, new):
  old = dataclasses.replace(old, sources=new.sources[:1] * len(new.sources))
  settings = {}
  for key, _, value in leaves(Run, new):
    settings[key] = (
      ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    )
  if new.rope is None:
    assert settings["rope"] == "None"
  assert override(old, settings) == new


@pytest.mark.parametrize(
  ("text", "value"),
  [("3", 3), ("-3", -3), ("1_000", 1000), ("1e6", 10**6), ("2.50e1", 25)],
)
def test_ints_are_taken_as_people_write_them(text, value):
  got = override(_RUN, {"steps": text}).steps
  assert got == value and type(got) is int


@pytest.mark.parametrize("text", ["1.5", "1e-3", "inf", "nan", "", "1e99", "x"])
def test_what_is_not_whole_is_not_an_int(text):
  with pytest.raises(ValueError) as error:
    override(Run(steps=1), {"steps": text})
  assert str(error.value) == f"config.steps: wanted int, got {text!r}"


@pytest.mark.parametrize(
  ("key", "text", "wanted"),
  [
    ("data.ratio", "much", "float or none"),
    ("data.shuffle", "1", "bool"),
    ("data.policy", "Skip", "error or skip"),
    ("data.window", "1.5", "int or auto"),
    ("data.betas", "0.9", "list of float, float"),
    ("rope.scaling", "ntk", "none, linear, llama3 or yarn"),
    ("rope", "1e4", "Rope or none"),
  ],
)
def test_wrong_type_names_key_wanted_and_got(key, text, wanted):
  run = Run(steps=1, rope=Rope(theta=1e4))
  with pytest.raises(ValueError) as error:
    override(run, {key: text})
  assert str(error.value) == f"config.{key}: wanted {wanted}, got {text!r}"


@pytest.mark.parametrize(
  ("key", "hint"),
  [
    ("step", "did you mean steps?"),
    ("data.sead", "did you mean data.seed?"),
    ("seed", "did you mean data.seed?"),  # Right name, wrong group.
    ("qqqqq", "known are: steps, data.seed, "),
    ("steps.x", "did you mean steps?"),
    ("sources.0.pth", "did you mean sources.0.path?"),
  ],
)
def test_unknown_key_shows_the_nearest(key, hint):
  with pytest.raises(ValueError) as error:
    override(Run(steps=1), {key: "1"})
  assert f"config.{key}: there is no such setting; {hint}" in str(error.value)


def test_optional_groups_come_and_go():
  run = override(Run(steps=1), {"rope.theta": "1e4", "rope.truncate": "false"})
  assert run.rope == Rope(theta=10_000.0, truncate=False)
  assert override(run, {"rope": "none"}).rope is None
  with pytest.raises(
    ValueError, match=r"config.rope.theta is required by Rope"
  ):
    override(Run(steps=1), {"rope.factor": "2"})
  with pytest.raises(ValueError, match="config.data is a group of settings"):
    override(run, {"data": "none"})


def test_items_are_addressed_by_number():
  run = override(Run(steps=1), {"sources.1.weight": "3"})
  assert run.sources == (Source(path="a"), Source(path="b", weight=3.0))
  for name in ("2", "-1", "01", "x"):
    with pytest.raises(ValueError, match="a number from 0 to 1 in place of"):
      override(run, {f"sources.{name}.weight": "3"})


@pytest.mark.parametrize("reverse", [False, True])
def test_a_group_and_its_part_contradict(reverse):
  settings = [("rope", "none"), ("rope.theta", "1")]
  with pytest.raises(ValueError, match="contradicts"):
    override(Run(steps=1), dict(settings[::-1] if reverse else settings))


def test_rules_across_fields_see_final_values_only():
  model = ModelConfig(
    vocab_size=7, num_layers=1, embed_dim=8, num_heads=4, num_kv_heads=2,
    head_dim=2, mlp_dim=8, max_positions=4, rope=None,
  )  # fmt: skip
  settings = {"num_heads": "9", "num_kv_heads": "3"}
  for order in (settings, dict(reversed(settings.items()))):
    got = override(model, order)
    assert (got.num_heads, got.num_kv_heads) == (9, 3)
  with pytest.raises(ValueError, match="must be a multiple"):
    override(model, {"num_heads": "9"})


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({}, "config.steps is required by Run and not set"),
    ({"steps": "1"}, "config.steps: wanted int, got '1'"),
    ({"steps": True}, "config.steps: wanted int, got True"),
    ({"steps": 1.0}, "config.steps: wanted int, got 1.0"),
    ({"steps": 1, "data": {"ratio": True}}, "wanted float or none, got True"),
    ({"steps": 1, "data": 3}, "config.data: wanted Data, got 3"),
    ({"steps": 1, "data": {"betas": [1]}}, "list of float, float, got [1]"),
    ({"steps": 1, "data": {"names": "ab"}}, "list of str, got 'ab'"),
    ({"steps": 1, "data": {"sed": 1}}, "did you mean seed?"),
    ({"steps": 1, "sources": [{}]}, "config.sources.0.path is required"),
    ({"steps": 1, "rope": {"theta": "x"}}, "config.rope.theta: wanted float"),
  ],
)
def test_json_of_the_wrong_shape(values, message):
  with pytest.raises(ValueError) as error:
    from_dict(Run, values)
  assert message in str(error.value)


def test_a_value_of_the_wrong_type_in_python_is_found():
  with pytest.raises(
    ValueError, match="config.data.names.0: wanted str, got 1"
  ):
    check(Run(steps=1, data=Data(names=(1,))))
