"""Which implementation of an op runs; none ever approximates what was asked."""

from collections.abc import Mapping
from typing import NamedTuple

import jax


class Request(NamedTuple):
  """What a call asks for beyond its arrays.

  Attributes:
    op: name of the op, for messages.
    impl: "auto" or a row of the table.
    uses: names of the arguments, or properties of them ("head_dim 80"), that
      not every implementation honours and that this call has set.
  """

  op: str
  impl: str
  uses: frozenset[str]


def choose(
  request: Request,
  table: Mapping[str, frozenset[str]],
  platform: str | None = None,
) -> str:
  """The implementation that will run.

  Args:
    request: what the call asks for.
    table: what each implementation honours. "auto" takes the first that
      honours the call among those named after the platform, "xla" and
      "reference".
    platform: of the devices that will run it ("cpu", "gpu", "tpu"); None:
      JAX's default.

  Returns:
    A key of `table`.

  Raises:
    ValueError: `impl` is unknown or cannot honour an argument; the message
      names the argument and the implementations that can.
  """
  op, impl, uses = request
  able = [name for name in table if uses <= table[name]]
  if impl != "auto":
    if impl not in table:
      raise ValueError(
        f"impl of {op} must be 'auto' or one of {sorted(table)}, got {impl!r}"
      )
    missing = sorted(uses - table[impl])
    if missing:
      raise ValueError(
        f"{op} with impl={impl!r} cannot honour {', '.join(missing)}; set impl"
        f" to one that can: {', '.join(able) or 'there is none'}"
      )
    return impl
  favourite = platform or jax.default_backend()
  for name in (favourite, "xla", "reference"):
    if name in able:
      return name
  raise ValueError(f"no implementation of {op} honours {', '.join(uses)}")
