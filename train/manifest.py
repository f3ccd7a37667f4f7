"""What a checkpoint must hold: the checksums of its files, and its leaves.

Orbax restores a flipped byte without a word and casts a wrong dtype to the one
asked for. The manifest notices both. It is written last, so that a checkpoint
without one is unfinished, and it holds a checksum of itself.
"""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from concurrent import futures

FILE = "manifest.json"
_ORBAX_NOTES = "_CHECKPOINT_METADATA"  # Times; rewritten on commit, never read.
_MAX_SHOWN = 6  # Differences named in one message.


def by_name(tree) -> dict:
  """The leaves of a pytree under their dotted names, in its order."""
  import jax  # Not at the top: the watchdog reads manifests without it.

  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf
    for path, leaf in leaves
  }


def describe(tree) -> dict[str, dict]:
  """Name -> {"shape", "dtype"} of every leaf, arrays or abstract."""
  return {
    name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    for name, leaf in by_name(tree).items()
  }


def write(directory: pathlib.Path, contents: Mapping) -> None:
  """Writes the manifest of a checkpoint whose files are all in place.

  Args:
    directory: of the checkpoint.
    contents: what to write beside the checksums, as JSON; "leaves" are those
      that `describe` gives.
  """
  files = _checksums(directory, _files(directory))
  body = json.loads(json.dumps({**contents, "files": files}))
  text = json.dumps({"sha256": _digest(body), **body}, indent=1)
  (directory / FILE).write_text(text)


def read(directory: pathlib.Path) -> dict | None:
  """The manifest; None: there is none, so the checkpoint is unfinished.

  Raises:
    ValueError: the manifest itself is damaged.
  """
  try:
    text = (directory / FILE).read_bytes()
  except FileNotFoundError:
    return None
  try:
    manifest = json.loads(text)
    digest = manifest.pop("sha256")
  except (ValueError, KeyError, AttributeError) as error:
    raise ValueError(f"{FILE} is damaged: {error}") from None
  if digest != _digest(manifest):
    raise ValueError(f"{FILE} is damaged: its own checksum differs")
  return manifest


def damage(directory: pathlib.Path, manifest: Mapping) -> list[str]:
  """The files that are not as they were written, and what differs."""
  problems = []
  whole = []
  for name, wanted in manifest["files"].items():
    path = directory / name
    if not path.is_file():
      problems.append(f"{name}: missing")
    elif path.stat().st_size != wanted["bytes"]:
      problems.append(
        f"{name}: {path.stat().st_size} bytes, written {wanted['bytes']}"
      )
    else:
      whole.append(name)
  for name, found in _checksums(directory, whole).items():
    if found["sha256"] != manifest["files"][name]["sha256"]:
      problems.append(f"{name}: checksum differs")
  return problems


def mismatches(saved: Mapping[str, dict], wanted: Mapping[str, dict]) -> list:
  """How the leaves of a checkpoint differ from those that are wanted."""
  problems = []
  for name in sorted({*saved, *wanted}):
    if name not in wanted:
      problems.append(f"{name}: only in the checkpoint")
    elif name not in saved:
      problems.append(f"{name}: not in the checkpoint")
    else:
      problems += [
        f"{name}: {what} {saved[name][what]} in the checkpoint,"
        f" {wanted[name][what]} wanted"
        for what in ("shape", "dtype")
        if saved[name][what] != wanted[name][what]
      ]
  return problems


def some(problems: list[str]) -> str:
  """A few problems, a line each, for a message."""
  rest = len(problems) - _MAX_SHOWN
  lines = problems[:_MAX_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
  return "".join(f"\n  {line}" for line in lines)


def _files(directory: pathlib.Path) -> list[str]:
  return sorted(
    str(path.relative_to(directory))
    for path in directory.rglob("*")
    if path.is_file() and path.name not in (FILE, _ORBAX_NOTES)
  )


def _checksums(directory: pathlib.Path, names: list[str]) -> dict[str, dict]:
  def checksum(name):
    with open(directory / name, "rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
      return {"bytes": file.tell(), "sha256": digest}

  with futures.ThreadPoolExecutor(4) as pool:  # hashlib releases the GIL.
    return dict(zip(names, pool.map(checksum, names), strict=True))


def _digest(body: Mapping) -> str:
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
