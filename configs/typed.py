"""Reads and writes nested frozen dataclasses by their annotations.

Text from a command line (`override`), JSON (`from_dict`) and values set in
Python (`check`) obey one set of rules. Annotations may be bool, int, float,
str, None, Literal, unions of these, tuple[X, ...], tuple[X, Y], dataclasses,
optional dataclasses and tuples of dataclasses.
"""

import dataclasses
import decimal
import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal


def override(config: Any, settings: dict[str, str]) -> Any:
  """Returns `config` with some fields replaced by values given as text.

  All settings of one dataclass are applied at once: checks across fields see
  the final values only, and the order of the settings does not matter.

  Args:
    config: a dataclass, possibly nested.
    settings: dotted key -> text, such as {"model.num_layers": "4",
      "data.sources.0.weight": "0.5", "model.window": "none"}.

  Raises:
    ValueError: unknown key (the nearest are named) or text of a wrong type.
  """
  known = [key for key, _, _ in leaves(type(config), config)]
  tree: dict[str, Any] = {}
  for key, text in settings.items():
    *groups, last = key.split(".")
    node = tree
    for group in groups:
      node = node.setdefault(group, {})
      if isinstance(node, str):
        raise ValueError(f"config.{key} contradicts the setting of {group!r}")
    if last in node:
      raise ValueError(f"config.{key} contradicts a setting below it")
    node[last] = text
  return _merge(config, type(config), tree, "", known)


def to_dict(config: Any) -> Any:
  """Returns what JSON can hold: dicts, lists and scalars."""
  if dataclasses.is_dataclass(config):
    fields = dataclasses.fields(config)
    return {f.name: to_dict(getattr(config, f.name)) for f in fields}
  if isinstance(config, tuple):
    return [to_dict(item) for item in config]
  return config


def from_dict(config_class: type, values: dict[str, Any]) -> Any:
  """The inverse of `to_dict`; a field that is absent takes its default.

  Raises:
    ValueError: unknown or missing key, or a value of a wrong type.
  """
  return _from_value(values, config_class, "")


def check(config: Any) -> None:
  """Raises ValueError where a value is not of its annotated type."""
  from_dict(type(config), to_dict(config))


def leaves(
  config_class: type, config: Any = None, prefix: str = ""
) -> Iterator[tuple[str, str, Any]]:
  """Yields (dotted key, type in words, value) of every setting.

  The values are those of `config`; without it, the defaults of the class, or
  `dataclasses.MISSING` where a value is required.
  """
  hints = typing.get_type_hints(config_class)
  for field in dataclasses.fields(config_class):
    key, hint = prefix + field.name, hints[field.name]
    value = _default(field) if config is None else getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      yield from leaves(type(value), value, key + ".")
    elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
      for i, item in enumerate(value):
        yield from leaves(type(item), item, f"{key}.{i}.")
    elif value is dataclasses.MISSING and _dataclass_in(hint):
      yield from leaves(_dataclass_in(hint), None, key + ".")
    else:
      yield key, type_name(hint), value


def type_name(hint: Any) -> str:
  """An annotation in words: "int or none", "a, b or c", "list of int"."""
  args = typing.get_args(hint)
  if hint is types.NoneType:
    return "none"
  if _is_union(hint):
    return " or ".join(map(type_name, args))
  if typing.get_origin(hint) is Literal:
    *most, last = map(str, args)
    return f"{', '.join(most)} or {last}" if most else last
  if typing.get_origin(hint) is tuple:
    return "list of " + ", ".join(type_name(a) for a in args if a is not ...)
  return hint.__name__


def nearest(name: str, known: list[str]) -> str:
  """Words for an error: the names that `name` may have been meant as."""
  group, _, last = name.rpartition(".")
  here = {
    k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == group
  }
  # The right name in another group, a slip of the pen, a slip in the group.
  close = [key for key in known if key.rpartition(".")[2] == last]
  close += [here[k] for k in difflib.get_close_matches(last, here)]
  close = close or difflib.get_close_matches(name, known)
  if not close:
    return "known are: " + ", ".join(known)
  return "did you mean " + " or ".join(dict.fromkeys(close)) + "?"


def _merge(value, hint, changes, key, known):
  """Applies texts, as a tree of dicts, to `value`, annotated as `hint`."""
  if isinstance(changes, str):
    return _from_text(changes, hint, key)
  dot = f"{key}." if key else ""
  if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
    items = dict(enumerate(value))
    for name, below in changes.items():
      if name not in map(str, items):
        raise ValueError(
          f"config.{dot}{name}: {key} has {len(items)} items; wanted a number"
          f" from 0 to {len(items) - 1} in place of {name!r}"
        )
      item = items[int(name)]
      items[int(name)] = _merge(item, type(item), below, dot + name, known)
    return tuple(items.values())
  cls = type(value) if dataclasses.is_dataclass(value) else _dataclass_in(hint)
  hints = typing.get_type_hints(cls) if cls else {}
  new = {}
  for name, below in changes.items():
    if name not in hints:
      raise ValueError(
        f"config.{dot}{name}: there is no such setting;"
        f" {nearest(dot + name, known)}"
      )
    old = getattr(value, name, None)
    new[name] = _merge(old, hints[name], below, dot + name, known)
  if dataclasses.is_dataclass(value):
    return dataclasses.replace(value, **new)
  return _construct(cls, new, key)


def _from_text(text: str, hint, key: str):
  args = typing.get_args(hint)
  if _is_union(hint):
    # str takes any text, so it is tried last.
    for arg in sorted(args, key=lambda arg: arg is str):
      try:
        return _from_text(text, arg, key)
      except ValueError:
        pass
  elif typing.get_origin(hint) is Literal:
    for arg in args:
      if text == str(arg):
        return arg
  elif typing.get_origin(hint) is tuple:
    texts = [item.strip() for item in text.split(",")] if text else []
    return _items(_from_text, texts, hint, key, text)
  elif dataclasses.is_dataclass(hint):
    names = ", ".join(field.name for field in dataclasses.fields(hint))
    raise ValueError(
      f"config.{key} is a group of settings: set config.{key}.NAME=VALUE, with"
      f" NAME one of {names}"
    )
  else:
    try:
      return _SCALARS[hint](text)
    except (ValueError, KeyError, decimal.InvalidOperation):
      pass
  raise _wrong_type(key, hint, text)


def _from_value(value, hint, key: str):
  args = typing.get_args(hint)
  if dataclasses.is_dataclass(hint) and isinstance(value, dict):
    dot = f"{key}." if key else ""
    hints = typing.get_type_hints(hint)
    for name in value:
      if name not in hints:
        raise ValueError(
          f"config.{dot}{name}: there is no such setting;"
          f" {nearest(name, list(hints))}"
        )
    fields = {n: _from_value(v, hints[n], dot + n) for n, v in value.items()}
    return _construct(hint, fields, key)
  if _is_union(hint):
    for arg in args:
      if dataclasses.is_dataclass(arg) and isinstance(value, dict):
        return _from_value(value, arg, key)
      try:
        return _from_value(value, arg, key)
      except ValueError:
        pass
  elif typing.get_origin(hint) is Literal:
    if any(type(value) is type(arg) and value == arg for arg in args):
      return value
  elif typing.get_origin(hint) is tuple:
    if isinstance(value, list | tuple):
      return _items(_from_value, value, hint, key, value)
  elif hint is float and type(value) is int:
    return float(value)
  elif type(value) is hint:
    return value
  raise _wrong_type(key, hint, value)


def _items(convert, values, hint, key, shown):
  """Converts the items of a tuple, each by its own annotation."""
  args = typing.get_args(hint)
  if args[-1] is ...:
    args = args[:1] * len(values)
  if len(args) != len(values):
    raise _wrong_type(key, hint, shown)
  return tuple(
    convert(value, arg, f"{key}.{i}")
    for i, (value, arg) in enumerate(zip(values, args))
  )


def _construct(cls, fields, key):
  dot = f"{key}." if key else ""
  for field in dataclasses.fields(cls):
    if field.name not in fields and _default(field) is dataclasses.MISSING:
      raise ValueError(
        f"config.{dot}{field.name} is required by {cls.__name__} and not set"
      )
  return cls(**fields)


def _parse_bool(text):
  return {"true": True, "false": False}[text.lower()]


def _parse_int(text):
  """Takes 3, 1_000 and 1e6: exact whole numbers, however they are written."""
  number = decimal.Decimal(text)
  if not number.is_finite() or number.adjusted() > 30 or number % 1:
    raise ValueError(text)
  return int(number)


def _parse_none(text):
  return {"none": None}[text.lower()]


_SCALARS = {
  bool: _parse_bool,
  int: _parse_int,
  float: float,
  str: str,
  types.NoneType: _parse_none,
}


def _wrong_type(key, hint, value):
  return ValueError(f"config.{key}: wanted {type_name(hint)}, got {value!r}")


def _is_union(hint) -> bool:
  return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _dataclass_in(hint):
  """The dataclass that `hint` is or may hold, as in `Rope | None`; or None."""
  options = typing.get_args(hint) if _is_union(hint) else (hint,)
  return next((o for o in options if dataclasses.is_dataclass(o)), None)


def _default(field: dataclasses.Field) -> Any:
  if field.default_factory is not dataclasses.MISSING:
    return field.default_factory()
  return field.default
