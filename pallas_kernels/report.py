"""A kernel's speed by the compiler's own word, with no TPU at hand.

  python -m pallas_kernels.report --op=flash_attention --topology=v5e:2x2
    [--shape=length=8192,head_dim=64] [--blocks=...] [--peer=splash] [--search]

Compiles the op for the topology, reads the static schedule and prints a table,
then a JSON object a row:

  bundles/step  bundles of the grid step that takes most of the time
  bundles       of the whole kernel: prologue, skipped tiles, every step
  MXU           share of the matrix unit's slots filled in the whole kernel
  core          bundles of the code that does most of its matmuls, and the
                share of the matrix unit's slots filled there from the first
                matmul to the last
  fill, spill   vector registers read back and put aside in the core, each time
  VMEM, HBM     MiB that the kernel needs, and that it copies
  bound us      the largest of bundles at the clock, bytes at HBM's bandwidth
                and useful FLOPs at the peak
  FLOP/bundle   useful ones: no masked score, nothing computed twice

The JSON row "outside" is what XLA adds around the kernels: sums of partial
gradients, copies into another layout, the loss that is differentiated.

--search tries the block sizes that the op names and prints the best as entries
of its tuning table; with --peer the peer is searched too, in the same process.
Where a chip has two cores, bundles are those of the slower one. A schedule does
not know when copies make a kernel wait: nobody gets below the bound.
"""

import contextlib
import importlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator

from absl import app, flags

from pallas_kernels import report_read, schedule
from pallas_kernels.report_chips import CHIPS, chip_of

FLAGS = flags.FLAGS

flags.DEFINE_string("op", None, "a folder of pallas_kernels/", required=True)
flags.DEFINE_string("topology", "v5e:2x2", "chips to compile for")
flags.DEFINE_list("shape", [], "NAME=SIZE of the op's shape")
flags.DEFINE_list("blocks", [], "NAME=SIZE of blocks, in place of the table's")
flags.DEFINE_string("peer", None, "a module of the op's folder, as `splash`")
flags.DEFINE_boolean("only_peer", False, "leave the op itself out")
flags.DEFINE_boolean("search", False, "try the block sizes that the op names")
flags.DEFINE_integer("top", 3, "rows of a search")

# What a kernel may use of VMEM (of 128 MiB) where it does not say so itself:
# peers leave it to their users.
_VMEM_LIMIT = "--xla_tpu_scoped_vmem_limit_kib=98304"
# Operands stay in HBM, as they do in a training step, whose arrays are larger:
# left alone, the compiler keeps small ones in VMEM across kernels.
_IN_HBM = (
  "--xla_vf_vmem_memory_space_assignment=false"
  " --xla_gf_vmem_memory_space_assignment=false"
)


@contextlib.contextmanager
def dump_folder() -> Iterator[str]:
  """A folder that the compiler writes schedules to; before JAX is imported."""
  folder = tempfile.mkdtemp(prefix="schedules")
  before = os.environ.get("LIBTPU_INIT_ARGS", "")
  os.environ["LIBTPU_INIT_ARGS"] = " ".join(
    [before, schedule.dump_flags(folder), _IN_HBM, _VMEM_LIMIT]
  )
  try:
    yield folder
  finally:
    shutil.rmtree(folder)


def figures(case, topology: str, folder: str):
  """Compiles and reads a case.

  Args:
    case: `report_case.Case`.
    topology: "v5e:2x2", ...
    folder: that of `dump_folder`.

  Returns:
    `report_read.Figures` of each part.
  """
  from pallas_kernels import aot

  for path in pathlib.Path(folder).iterdir():
    path.unlink()
  compiled = aot.compile_for(topology, case.function, *case.args)
  chip = CHIPS[chip_of(topology)]
  return report_read.read_case(case, folder, compiled.as_text(), chip)


def search(module, topology: str, shape: dict, folder: str):
  """Figures of all candidates of an op that compile.

  Args:
    module: of the op or the peer; see `report_case`.
    topology: "v5e:2x2", ...
    shape: its settings.
    folder: that of `dump_folder`.

  Returns:
    Part -> its figures, the most useful FLOPs a bundle first.
  """
  chip, found = chip_of(topology), {}
  for blocks in module.candidates(chip, shape):
    tried = " ".join(f"{name}={size}" for name, size in blocks.items())
    try:
      case = module.make_case(chip, shape, blocks)
      for row in figures(case, topology, folder):
        # A part may come again, with other blocks of the other part.
        found.setdefault(row.part, {})[tuple(row.blocks.items())] = row
        tried += f", {row.part}: {row.flops_per_bundle:.0f} FLOP/bundle"
    except Exception as error:  # out of VMEM, or blocks that an op refuses
      tried += f": {str(error).strip().splitlines()[0][:120]}"
    print(tried, file=sys.stderr, flush=True)
  return {
    part: sorted(rows.values(), key=lambda row: -row.flops_per_bundle)
    for part, rows in found.items()
  }


def table(rows: list[tuple[str, object]]) -> str:
  """A line each for (name, figures)."""
  heads = (
    f"{'':<24}{'bundles/step':>13}{'bundles':>11}{'MXU':>7}{'core':>7}"
    f"{'(MXU)':>7}{'fill':>7}{'spill':>7}{'VMEM':>7}{'HBM':>8}{'bound us':>10}"
    f"{'FLOP/bundle':>12}  blocks"
  )
  lines = [heads]
  for name, row in rows:
    blocks = " ".join(f"{k}={v}" for k, v in row.blocks.items())
    lines.append(
      f"{name:<24}{row.steady_bundles:>13}{row.kernel_bundles:>11}"
      f"{row.occupancy:>7.1%}{row.core_bundles:>7}{row.core_occupancy:>7.1%}"
      f"{row.core_fills:>7}{row.core_spills:>7}{row.vmem_bytes / 2**20:>7.2f}"
      f"{row.hbm_bytes / 2**20:>8.1f}{row.bound_us:>10.1f}"
      f"{row.flops_per_bundle:>12.0f}  {blocks}"
    )
  return "\n".join(lines)


def best_entry(module, topology: str, shape: dict, found: dict) -> str:
  """The winners of a search as an entry of the op's tuning table.

  Without spills wherever a candidate has none.

  Args:
    module: of the op or the peer.
    topology: "v5e:2x2", ...
    shape: its settings.
    found: of `search`.
  """
  best = {}
  for part, rows in found.items():
    clean = [row for row in rows if row.core_spills == 0]
    best[part] = (clean or rows)[0].blocks
  chip = chip_of(topology)
  entry = getattr(module, "table_entry", lambda *args: str(args))
  return entry(chip, shape, best)


def settings(words: list[str], known: Iterable[str]) -> dict[str, int]:
  """{"length": 4096} of ["length=4096"].

  Raises:
    ValueError: a name is not known, or has no whole number.
  """
  found = {}
  for word in words:
    name, _, size = word.partition("=")
    if name not in known or not size.isdecimal():
      raise ValueError(
        f"wanted NAME=SIZE with a name of {sorted(known)}, got {word!r}"
      )
    found[name] = int(size)
  return found


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise app.UsageError(f"unknown arguments {argv[1:]}")
  with dump_folder() as folder:
    modules = {} if FLAGS.only_peer else {FLAGS.op: "report"}
    if FLAGS.peer:
      modules[FLAGS.peer] = FLAGS.peer
    rows, entries, around = [], [], {}
    for name, file in modules.items():
      module = importlib.import_module(f"pallas_kernels.{FLAGS.op}.{file}")
      shape = module.SHAPE | settings(FLAGS.shape, module.SHAPE)
      if FLAGS.search:
        found = search(module, FLAGS.topology, shape, folder)
        for part, best in found.items():
          rows += [(f"{name} {part}", row) for row in best[: FLAGS.top]]
        entries.append(best_entry(module, FLAGS.topology, shape, found))
      else:
        chip = chip_of(FLAGS.topology)
        case = module.make_case(chip, shape, None)
        if FLAGS.blocks and name == FLAGS.op:
          blocks = case.blocks | settings(FLAGS.blocks, case.blocks)
          case = module.make_case(chip, shape, blocks)
        for row in figures(case, FLAGS.topology, folder):
          rows.append((f"{name} {row.part}", row))
        around[name] = report_read.outside(case, folder)
  print(table(rows))
  for name, row in rows:
    print(json.dumps({"name": name} | row.as_json()))
  for name, (bundles, moved) in around.items():
    print(
      json.dumps(dict(name=f"{name} outside", bundles=bundles, hbm_bytes=moved))
    )
  print("\n".join(entries))


if __name__ == "__main__":
  app.run(main)
