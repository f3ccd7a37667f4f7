"""Which implementation is taken, and what is refused."""

import pytest

from pallas_kernels.impls import Request, choose

TABLE = {
  "reference": frozenset({"dropout", "soft_cap"}),
  "xla": frozenset({"dropout"}),
  "tpu": frozenset({"soft_cap"}),
  "gpu": frozenset(),
}


def request(impl: str, *uses: str) -> Request:
  return Request("attention", impl, frozenset(uses))


@pytest.mark.parametrize("impl", TABLE)
def test_a_named_one_that_honours_the_call_is_taken(impl):
  assert choose(request(impl, *TABLE[impl]), TABLE, "tpu") == impl


@pytest.mark.parametrize(
  ("uses", "platform", "expected"),
  [
    ((), "tpu", "tpu"),
    ((), "gpu", "gpu"),
    ((), "cpu", "xla"),
    ((), "a platform of tomorrow", "xla"),
    (("soft_cap",), "tpu", "tpu"),
    (("dropout",), "tpu", "xla"),
    (("dropout",), "gpu", "xla"),
    (("soft_cap",), "cpu", "reference"),
    (("soft_cap", "dropout"), "tpu", "reference"),
  ],
)
def test_auto_takes_the_fastest_that_honours_the_call(uses, platform, expected):
  assert choose(request("auto", *uses), TABLE, platform) == expected


def test_auto_without_a_platform_is_that_of_the_process():
  assert choose(request("auto"), TABLE) == "xla"


def test_an_argument_that_is_not_honoured_names_itself_and_who_can():
  with pytest.raises(ValueError) as error:
    choose(request("tpu", "dropout", "soft_cap"), TABLE)
  assert "impl='tpu' cannot honour dropout;" in str(error.value)
  assert str(error.value).endswith("can: reference")


def test_two_arguments_are_both_named():
  with pytest.raises(ValueError, match="cannot honour dropout, soft_cap;"):
    choose(request("gpu", "soft_cap", "dropout"), TABLE)


def test_what_nobody_honours_is_refused():
  with pytest.raises(ValueError, match="there is none"):
    choose(request("xla", "sinks"), TABLE)
  with pytest.raises(ValueError, match="no implementation of attention"):
    choose(request("auto", "sinks"), TABLE)


def test_an_unknown_implementation_is_refused():
  with pytest.raises(ValueError, match="impl of attention must be 'auto' or"):
    choose(request("cuda"), TABLE)
