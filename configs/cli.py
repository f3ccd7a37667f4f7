"""Command lines of the mains: one config file, one folder, typed overrides.

  python -m train.pretrain --config=configs/FILE.py[:variant] --workdir=DIR
    --config.model.num_layers=4 --config.schedule.peak=3e-4

A config file is Python. Its `get_config()` returns the dataclass of the loop,
`get_config("variant")` another one. New settings go into the dataclass of the
part that reads them, never into new flags. Imports no JAX: `--help` is instant.
"""

import dataclasses
import importlib.util
import inspect
import pathlib
import re
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

from absl import app, flags, logging

from configs.typed import check, from_dict, leaves, nearest, override, to_dict

__all__ = ["check", "from_dict", "launch", "load", "override", "to_dict"]

FLAGS = flags.FLAGS
_ROOMS = (
  "align", "data", "evals", "model", "plan", "serve", "sharding", "train",
)  # fmt: skip
_HELP_FLAGS = ("help", "helpshort", "helpfull", "h", "?")


def launch(
  run: Callable[..., Any],
  config_class: type | Mapping[str, type],
  *,
  options: dict[str, str] | None = None,
) -> None:
  """Runs `run(config, workdir)` as the command line says; does not return.

  Args:
    run: the loop. What is heavy it imports inside, so that `--help` does not.
    config_class: the dataclass that the config file must return; or that of
      each value of the option `loop`, the first of which is the default.
    options: of a main that answers a question and writes no folder: flag ->
      what it says, in place of `workdir`. It is `run(config, **texts)`, with
      None for a flag that is not given; a ValueError of it is the user's.
  """
  one = isinstance(config_class, type)
  classes = {"": config_class} if one else config_class
  flags.DEFINE_string("config", None, "FILE.py or FILE.py:variant, the run")
  wanted = {"workdir": "folder for all that the run writes"}
  for name, text in (options or wanted).items():
    flags.DEFINE_string(name, None, text)

  def parse(argv):
    if any(argument.lstrip("-") in _HELP_FLAGS for argument in argv[1:]):
      print(_help(classes, ("config", *(options or wanted))))
      sys.exit(0)
    settings = [a for a in argv if re.match("--?config[.]", a)]
    try:
      return FLAGS([a for a in argv if a not in settings]) + settings
    except flags.Error as error:
      sys.exit(f"error: {error}")

  def main(argv):
    try:
      settings = _settings(argv[1:])
      for name in ("config",) if options else ("config", "workdir"):
        if not FLAGS[name].value:
          raise ValueError(f"--{name} is missing: {FLAGS[name].help}")
      config = configure(FLAGS.config, _chosen(classes), settings)
    except ValueError as error:
      sys.exit(f"error: {error}")
    if not FLAGS["verbosity"].present:
      logging.set_verbosity(logging.WARNING)  # Orbax tells all that it does.
    if options is None:
      run(config, FLAGS.workdir)
      return
    try:
      run(config, **{name: FLAGS[name].value for name in options})
    except ValueError as error:
      sys.exit(f"error: {error}")

  app.run(main, flags_parser=parse)


def configure(path: str, config_class: type, settings: dict[str, str]) -> Any:
  """Loads a config and applies overrides: what a command line means.

  Args:
    path: FILE.py[:variant].
    config_class: the dataclass that it must return.
    settings: see `override`.

  Raises:
    ValueError: any mistake in the file or in the settings.
  """
  config = load(path)
  if not isinstance(config, config_class):
    raise ValueError(
      f"--config: this command wants a {config_class.__name__}, {path}"
      f" returned {type(config).__name__}"
    )
  check(config)
  return override(config, settings)


def load(path: str) -> Any:
  """Returns what FILE.py's `get_config` makes of `path`, FILE.py[:variant].

  Raises:
    ValueError: no such file, an empty file, no `get_config` in it, or a
      variant that it does not know.
  """
  match = re.fullmatch(r"(.+\.py)(?::(.+))?", path)
  if not match:
    raise ValueError(
      f"--config: wanted FILE.py or FILE.py:variant, got {path!r}"
    )
  file, variant = pathlib.Path(match[1]), match[2]
  if not file.is_file():
    there = sorted(str(other) for other in file.parent.glob("*.py"))
    hint = nearest(str(file), there) if there else f"in {pathlib.Path.cwd()}"
    raise ValueError(f"--config: there is no file {str(file)!r}; {hint}")
  name = f"config_file_{file.stem}"
  spec = importlib.util.spec_from_file_location(name, file)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # Dataclasses of the file look themselves up.
  spec.loader.exec_module(module)
  get_config = getattr(module, "get_config", None)
  if get_config is None:
    what = "is empty" if not file.read_text().strip() else "does not have it"
    raise ValueError(
      f"--config: wanted a function get_config() that returns the config;"
      f" {str(file)!r} {what}"
    )
  if variant is None:
    return get_config()
  _check_variant(get_config, variant, file)
  return get_config(variant)


def _check_variant(get_config, variant, file):
  """Variants are listed by the annotation: get_config(variant: Literal[..])."""
  parameters = list(inspect.signature(get_config).parameters)
  if not parameters:
    raise ValueError(f"--config: {str(file)!r} has no variants, got :{variant}")
  hint = typing.get_type_hints(get_config).get(parameters[0])
  variants = [str(arg) for arg in typing.get_args(hint)]
  if variants and variant not in variants:
    raise ValueError(
      f"--config: {str(file)!r} has no variant {variant!r};"
      f" {nearest(variant, variants)}"
    )


def _check_packages_are_ours() -> None:
  """`python -m` puts the current folder first: a `data/` there hides ours."""
  home = pathlib.Path(__file__).resolve().parents[1]
  for room in _ROOMS:
    spec = importlib.util.find_spec(room)
    if spec and spec.origin:
      folder = pathlib.Path(spec.origin).resolve().parent
      if folder.parent != home:
        raise ImportError(
          f"{folder} hides the package {room!r} of OneMesh: run"
          " `python -P -m ...`, or start from another folder"
        )


def _settings(arguments: list[str]) -> dict[str, str]:
  """What stands on the line besides flags: "--config.a.b=value"."""
  settings = {}
  for argument in arguments:
    match = re.fullmatch(r"--?config[.]([^=]+)=(.*)", argument, re.DOTALL)
    if not match:
      raise ValueError(f"wanted --config.KEY=VALUE, got {argument!r}")
    settings[match[1]] = match[2]
  return settings


def _chosen(classes: Mapping[str, type]) -> type:
  """The class of the config that this command line is about."""
  if len(classes) == 1:
    return next(iter(classes.values()))
  loop = FLAGS["loop"].value or next(iter(classes))
  if loop not in classes:
    raise ValueError(f"--loop must be one of {tuple(classes)}, got {loop!r}")
  return classes[loop]


def _help(classes, names) -> str:
  """The text of --help: what the main says of itself, flags, settings."""
  lines = [(sys.modules["__main__"].__doc__ or "").strip(), "", "Flags:"]
  lines += [f"  --{n}: {FLAGS[n].help}" for n in names]
  for config_class in dict.fromkeys(classes.values()):
    lines += ["", f"Settings of {config_class.__name__} and their defaults:"]
    for key, words, value in leaves(config_class):
      default = "(required)" if value is dataclasses.MISSING else f"{value!r}"
      lines.append(f"  --config.{key}={default}  {words}")
  return "\n".join(lines)


_check_packages_are_ours()
