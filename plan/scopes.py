"""Where an instruction of a compiled program is from: phase, scope, source.

JAX names each operation by the path of transformations, loops, name scopes and
primitives that it was traced in. The compiler keeps one such name an
instruction, that of a fusion's root.
"""

import pathlib
import re
from typing import NamedTuple

from sharding.hlo_text import Instruction, Module

_HOME = pathlib.Path(__file__).resolve().parents[1]
# Parts of a path that say how something is run, not what it is.
_HOW = re.compile(
  r"jit\(.*\)|jvp\(\)|transpose\(.*\)|while|body|cond|branch_\d+_fun"
  r"|closed_call|checkpoint|rematted_computation|shard_map|pallas_call"
  r"|custom_\w+_call|pjit|vmap\(\)|scan|eval_jaxpr"
)
# Of a matmul and of a kernel: who calls them says more.
_WRAPPERS = ("linear.py", "call.py")
_TABLE = re.compile(r"^(\d+) (?:\"([^\"]*)\"|\{([^}]*)\})$")


class Scope(NamedTuple):
  """What instructions are added up by.

  Attributes:
    phase: "forward", "backward", "again" (forward, computed again for the
      backward pass) or "", which is outside of what is differentiated.
    name: name scopes, then the primitive.
    source: "model/mlp.py:42", of what called the primitive, or "".
  """

  phase: str
  name: str
  source: str


class Scopes:
  """The scopes of a program's instructions."""

  def __init__(self, module: Module):
    """Reads the tables of source lines, where the program has them."""
    tables, rows = {}, {}
    for line in module.header:
      if line.isalpha():
        rows = tables[line] = {}
      elif found := _TABLE.match(line):
        values = re.findall(r"(\w+)=(\d+)", found[3] or "")
        rows[found[1]] = found[2] or dict(values)
    self._files = tables.get("FileNames", {})
    self._places = tables.get("FileLocations", {})
    self._frames = tables.get("StackFrames", {})

  def of(self, instruction: Instruction) -> Scope:
    """The scope of an instruction."""
    path = instruction.op_name
    if "rematted_computation" in path:
      phase = "again"
    elif "transpose(" in path:
      phase = "backward"
    else:
      phase = "forward" if "jvp(" in path else ""
    parts = [part for part in path.split("/") if not _HOW.fullmatch(part)]
    name = "/".join(parts) or re.sub(r"[.\d]+$", "", instruction.name)
    return Scope(phase, name, self._source(instruction))

  def _source(self, instruction: Instruction) -> str:
    """The innermost line of this repository, but for wrappers."""
    found = re.search(r"stack_frame_id=(\d+)", instruction.line)
    number, last = found[1] if found else "", ""
    while (frame := self._frames.get(number)) and "file_location_id" in frame:
      place = self._places[frame["file_location_id"]]
      path = pathlib.Path(self._files[place["file_name_id"]])
      if path.is_relative_to(_HOME):
        last = f"{path.relative_to(_HOME)}:{place['line']}"
        if path.name not in _WRAPPERS:
          return last
      # A parent is written one too high: 1 is none.
      number = str(int(frame["parent_frame_id"]) - 1)
    return last
