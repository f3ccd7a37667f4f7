"""Links of an axis, counted by hand."""

import pytest

from plan.chips import CHIPS, parse
from plan.links import axis_rates, group_rate
from sharding.axes import MESH_AXES


def links(text: str, **sizes) -> dict[str, float]:
  """Links of each axis."""
  machine = parse(text)
  rates = axis_rates(machine, dict.fromkeys(MESH_AXES, 1) | sizes)
  one = machine.chip.link_bytes_per_second
  return {axis: rate / one for axis, rate in rates.items()}


@pytest.mark.parametrize(
  ("text", "sizes", "want"),
  [
    # A whole pod is a torus of two rings; a part of it has no ring.
    ("v5e:16x16", dict(fsdp=256), dict(fsdp=4)),
    ("v5e:4x4", dict(fsdp=16), dict(fsdp=2)),
    ("v5e:4x4", dict(fsdp=4, tensor=4), dict(fsdp=1, tensor=1)),
    # The other axis has the rest of a dim that is cut, and a ring.
    ("v5e:16x16", dict(fsdp=64, tensor=4), dict(fsdp=3, tensor=1)),
    ("v5p:4x4x8", dict(fsdp=64, tensor=2), dict(fsdp=5, tensor=1)),
    ("v5p:4x4x8", dict(data=2, fsdp=32, tensor=2), dict(data=1, fsdp=4)),
    # Cubes are closed by optical switches.
    ("v5p:4x4x4", dict(fsdp=64), dict(fsdp=6)),
    ("v5p:4x4x4", dict(fsdp=16, tensor=4), dict(fsdp=4, tensor=2)),
    ("v5p:2x2x2", dict(fsdp=4, tensor=2), dict(fsdp=2, tensor=1)),
  ],
)
def test_links_of_a_torus(text, sizes, want):
  assert want.items() <= links(text, **sizes).items()


def test_nodes_and_slices_are_joined_by_the_slow_network():
  chip = CHIPS["h100"]
  sizes = dict.fromkeys(MESH_AXES, 1) | dict(fsdp=4, tensor=8)
  rates = axis_rates(parse("h100:4x8"), sizes)
  assert rates == {"tensor": 450e9, "fsdp": chip.slow_bytes_per_second}
  sizes |= dict(data=2, fsdp=16, tensor=1)
  rates = axis_rates(parse("v5e:2x(4x4)"), sizes)
  assert rates["data"] == CHIPS["v5e"].slow_bytes_per_second
  assert rates["fsdp"] == 2 * 50e9
  with pytest.raises(ValueError, match=r"mesh.data to be a multiple of 2"):
    axis_rates(parse("v5e:2x(4x4)"), sizes | dict(data=1, fsdp=32))


def test_a_collective_over_two_axes_uses_the_links_of_both():
  rates = {"fsdp": 4.0, "context": 2.0, "data": 0.5}
  assert group_rate(rates, ("context",)) == 2.0
  assert group_rate(rates, ("fsdp", "context")) == 4.0
  assert group_rate(rates, ("data", "fsdp")) == 1.0
