"""The scalar instructions of a TPU program, as its schedule writes them.

Enough of them to follow branches and copies: integers, predicates, addresses.
"""

import re
from typing import NamedTuple

_WORD = 1 << 32

_INSTRUCTION = re.compile(r"\s*(%\w+) = ([a-z_]\w*(?:\.\w+)*)\s*(.*)", re.S)
_GUARD = re.compile(r"(?:\[thread:\$\d+\]\s*)?\((!?)(%\w+)(?:, (%\w+))?\),? *")
# A load has it behind the address.
_GUARD_BEHIND = re.compile(r"(?<=\]) *\((!?)(%\w+)(?:, (%\w+))?\),? *")
_OPERAND = re.compile(r"index: (\d+)")
_THREAD = re.compile(r"\[thread:\$\d+\]\s*")


class Pointer(NamedTuple):
  """An address: `offset` words (or bytes) into the memory `base`."""

  base: str
  offset: int


class Op(NamedTuple):
  """An instruction.

  Attributes:
    name: "sadd.s32", ...
    out: name of its value.
    negated: whether it runs where `guard` is false.
    guard: the predicate that it waits for, or "".
    otherwise: what `out` is where it does not run, or "".
    inputs: of int, `Pointer` or the name of a value.
  """

  name: str
  out: str
  negated: bool
  guard: str
  otherwise: str
  inputs: tuple


def parse_bundle(text: str) -> list[Op]:
  """The instructions of a bundle that scalars or copies depend on."""
  ops = []
  for part in text.split(";;"):
    match = _INSTRUCTION.match(part)
    if not match:
      continue
    out, name, rest = match.groups()
    if name.startswith("inlined_call_operand"):
      index = int(_OPERAND.search(rest)[1])
      # One number, as a bound of the grid, arrives in a register.
      scalar = rest.startswith(".<no memory space> [shape: s32[")
      name = "operand" if scalar else "smov.u32"
      given = index if scalar else Pointer(f"operand{index}", 0)
      ops.append(Op(name, out, False, "", "", (given,)))
      continue
    scalar = out.startswith(("%s", "%p")) and not name.startswith("v")
    if not scalar and name.split(".")[0] not in ("sst", "dma"):
      continue
    guard = _GUARD.match(rest) or _GUARD_BEHIND.search(rest)
    negated, predicate, otherwise = False, "", ""
    if guard:
      negated, predicate = bool(guard[1]), guard[2]
      otherwise = guard[3] or ""
      rest = rest[: guard.start()] + rest[guard.end() :]
    rest = _THREAD.sub("", rest).replace("resolvable:$", "")
    inputs = tuple(map(_parse_operand, _operands(rest)))
    ops.append(Op(name, out, negated, predicate, otherwise, inputs))
  return ops


def _operands(text) -> list[str]:
  """Words of an instruction: names, numbers, allocations."""
  text = re.sub(r"\[(true|false)\]", "", text)
  return re.findall(r"!?%\w+|#allocation\w+|\$?0x[0-9a-f]+|-?\b\d+\b", text)


def _parse_operand(word):
  if word.startswith("#"):
    return Pointer(word, 0)
  if word.startswith(("%", "!")):
    return word
  return _signed(int(word.lstrip("$"), 0))


def _signed(value: int) -> int:
  value %= _WORD
  return value - _WORD if value >= _WORD >> 1 else value


def add(x, y):
  """The sum of integers and pointers."""
  if isinstance(x, Pointer) and isinstance(y, Pointer):
    return Pointer(x.base + y.base, x.offset + y.offset)
  if isinstance(x, Pointer):
    return Pointer(x.base, x.offset + y)
  if isinstance(y, Pointer):
    return Pointer(y.base, x + y.offset)
  return _signed(x + y)


_COMPARE = {
  "eq": lambda x, y: x == y,
  "ne": lambda x, y: x != y,
  "lt": lambda x, y: x < y,
  "le": lambda x, y: x <= y,
  "gt": lambda x, y: x > y,
  "ge": lambda x, y: x >= y,
}
_INTEGERS = {
  "ssub": lambda x, y: x - y,
  "smul": lambda x, y: x * y,
  "sand": lambda x, y: x & y,
  "sor": lambda x, y: x | y,
  "sxor": lambda x, y: x ^ y,
  "smin": min,
  "smax": max,
  "sshra": lambda x, y: x >> (y % 32),
  "sshrl": lambda x, y: (x % _WORD) >> (y % 32),
  "sshll": lambda x, y: x << (y % 32),
}


def compute(name, inputs):
  """The result of an instruction; None if it is not known."""
  kind, *modifiers = name.split(".")
  if kind in ("smov", "int_to_ptr") and len(inputs) == 1:
    return inputs[0]
  if kind == "scalar_select":
    return inputs[0] if inputs[0] is None else inputs[1 if inputs[0] else 2]
  if kind in ("por", "pand", "pnand", "pnor", "pxor", "pneg", "pmov"):
    return _logic(kind, inputs)
  if len(inputs) != 2 or None in inputs:
    return None
  x, y = inputs
  if kind in ("sadd", "scalar_lea"):
    return add(x, y)
  if isinstance(x, Pointer) and kind == "sshll":
    return x  # a change of unit
  if isinstance(x, Pointer) or isinstance(y, Pointer):
    return None
  if kind == "scmp" and modifiers[1] in ("s32", "u32"):
    if modifiers[1] == "u32":
      x, y = x % _WORD, y % _WORD
    return _COMPARE[modifiers[0]](x, y)
  if kind in _INTEGERS:
    return _signed(_INTEGERS[kind](x, y))
  return None


def _logic(kind, inputs):
  """Of predicates, of which some may be unknown (None)."""
  if kind in ("pneg", "pmov"):
    (x,) = inputs
    return x if x is None or kind == "pmov" else not x
  if kind == "pxor":
    return None if None in inputs else inputs[0] != inputs[1]
  decisive = kind in ("por", "pnor")  # the value that alone decides
  if any(x is not None and bool(x) == decisive for x in inputs):
    known = decisive
  elif None in inputs:
    return None
  else:
    known = not decisive
  return known != (kind in ("pnand", "pnor"))
