"""The text that `plan.dryrun` prints."""

from collections.abc import Iterator, Mapping

_GIB = 2**30
_NAMES = {
  "hidden": "all communication hidden",
  "estimate": "as it is scheduled",
  "exposed": "none hidden",
}
_NOTES = {
  "FLOPs": "stated FLOPs at the peak: its schedule depends on data",
  "nothing": "not counted: its author states no FLOPs",
}


def table(found: Mapping) -> str:
  """The figures of `plan.dryrun.run`, for a reader."""
  parts = [_head, _refusal, _memory, _flops, _kernels, _collectives, _times]
  parts += [_storage, _ops]
  blocks = ("\n".join(part(found)) for part in parts)
  return "\n\n".join(block for block in blocks if block)


def _head(found) -> Iterator[str]:
  mesh = ", ".join(f"{axis} {n}" for axis, n in found["mesh"].items())
  yield (
    f"{found['loop']} on {found['num_devices']} x {found['chip']}"
    f" ({found['topology']}), {mesh or 'one device'}"
  )
  if "compile_seconds" in found:
    yield (
      f"lowered in {found['lower_seconds']:.1f} s, compiled in"
      f" {found['compile_seconds']:.1f} s"
    )


def _refusal(found) -> Iterator[str]:
  if "rejected" in found:
    yield f"rejected: {found['rejected']}"
    yield from _remedies(found)


def _memory(found) -> Iterator[str]:
  if "memory" not in found:
    return
  yield f"{'memory':<34}{'GiB a device':>12}"
  for name, size in found["memory"].items():
    if size and name not in ("peak", "host"):
      yield f"  {name:<32}{size / _GIB:>12.3f}"
  if found["memory"].get("host"):
    yield f"  {'in host memory':<32}{found['memory']['host'] / _GIB:>12.3f}"
  what = found.get("peak_phase", "all at once")
  yield (
    f"{'need, ' + what:<34}{found['need'] / _GIB:>12.3f} of"
    f" {found['hbm'] / _GIB:.2f}: {'fits' if found['fits'] else 'does not fit'}"
  )
  yield from _remedies(found)


def _remedies(found) -> Iterator[str]:
  if "remedies" not in found:
    return
  yield "it would fit, by estimate, with"
  for remedy in found["remedies"]:
    settings = " ".join(f"--config.{line}" for line in remedy["settings"])
    yield f"  {remedy['peak'] / _GIB:7.2f} GiB  {settings}"
  if not found["remedies"]:
    yield "  nothing that was tried: take more devices, or a smaller model"


def _flops(found) -> Iterator[str]:
  yield f"{'FLOPs of a device in a step':<34}"
  for name in ("model", "recomputed", "hardware"):
    yield f"  {name:<32}{found[f'{name}_flops']:>12.4g}"


def _kernels(found) -> Iterator[str]:
  rows = found.get("kernels", ())
  if rows:
    yield f"{'Pallas kernels':<34}{'calls':>12}{'ms a step':>12}  by"
  for row in rows:
    by = _NOTES.get(row["by"], row["by"])
    milliseconds = f"{row['seconds'] * 1e3:>12.2f}"
    yield f"  {row['name']:<32}{row['calls']:>12}{milliseconds}  {by}"


def _collectives(found) -> Iterator[str]:
  rows = found.get("collectives", {})
  if not rows:
    return
  compiled = "compile_seconds" in found
  yield f"{'communication over':<34}" + (
    f"{'calls':>8}{'GiB sent':>12}{'ms':>12}{'hidden':>8}"
    if compiled
    else f"{'ms':>12}"
  )
  for axes, row in rows.items():
    milliseconds = f"{row['seconds'] * 1e3:>12.2f}"
    if compiled:
      yield (
        f"  {axes:<32}{row['calls']:>8}{row['bytes'] / _GIB:>12.3f}"
        f"{milliseconds}{row['hidden']:>8.0%}"
      )
    else:
      yield f"  {axes:<32}{milliseconds}"


def _times(found) -> Iterator[str]:
  if "rates" not in found:
    return
  yield f"{'a step':<34}{'ms':>12}{'tok/s/dev':>12}{'MFU':>8}{'HFU':>8}"
  for name, row in found["rates"].items():
    yield (
      f"  {_NAMES[name]:<32}{row['seconds'] * 1e3:>12.2f}"
      f"{row['tokens_per_second']:>12.0f}{row['mfu']:>8.1%}{row['hfu']:>8.1%}"
    )
  for name, seconds in found["times"].items():
    if name not in found["rates"] and seconds:
      yield f"  {'of it ' + name:<32}{seconds * 1e3:>12.2f}"
  if "bound" in found:
    yield f"  bound by {found['bound']}; peaks, no compiler"
  if found.get("host_bytes"):
    yield (
      f"  {found['host_bytes'] / _GIB:.2f} GiB to and from the host, whose time"
      " is not counted"
    )


def _storage(found) -> Iterator[str]:
  if "checkpoint_bytes" not in found:
    return
  data, state = found["data_bytes"], found["checkpoint_bytes"]
  yield f"{'storage, all devices':<34}"
  yield f"  {'tokens read a step, MiB':<32}{data / 2**20:>12.3f}"
  yield f"  {'a checkpoint, GiB':<32}{state / _GIB:>12.3f}"
  rates = found.get("rates", {})
  row = rates.get("estimate") or rates.get("hidden")
  if row:
    yield f"  {'read, MB/s':<32}{data / row['seconds'] / 1e6:>12.3f}"
    if found["checkpoint_every"]:
      seconds = row["seconds"] * found["checkpoint_every"]
      yield (
        f"  {'written, MB/s at least':<32}{state / seconds / 1e6:>12.3f}"
        f"  one checkpoint every {seconds:.0f} s"
      )


def _ops(found) -> Iterator[str]:
  rows = found.get("ops", ())
  if rows:
    yield f"{'most expensive':<36}{'ms a step':>12}{'share':>8}"
  whole = found["times"]["estimate"] if rows else 1.0
  for row in rows:
    yield (
      f"  {row['phase']:<9}{row['name'][-25:]:<25}{row['seconds'] * 1e3:>12.2f}"
      f"{row['seconds'] / whole:>8.1%}  {row['source']}"
    )
