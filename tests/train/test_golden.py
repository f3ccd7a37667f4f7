"""No upgrade and no edit adds a collective to a step unseen."""

import pytest

from tests.train import golden

# The others take long to compile.
QUICK = ("fsdp",)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
  "name",
  [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in golden.RECIPES
  ],
)
def test_collectives_are_those_recorded(name):
  table = golden.recorded()
  version = golden.version()
  if version not in table:
    pytest.skip(f"none recorded for jax {version}: {golden.__doc__}")
  assert golden.counted(name) == table[version][name], golden.__doc__


def test_recorded_recipes_are_all():
  """And what is said of them holds: bytes of the recipes in proportion."""
  for version, table in golden.recorded().items():
    assert table.keys() == golden.RECIPES.keys(), version
    sent = {
      name: sum(num_bytes for _, num_bytes in ops.values())
      for name, ops in table.items()
    }
    # Gathered in bf16, scattered in float32, each for every micro-batch.
    assert sent["data"] < sent["zero-2"] < sent["fsdp"], sent
    assert not any("all-gather" in key for key in table["data"]), version
