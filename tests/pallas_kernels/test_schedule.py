"""Static schedules: what a recorded one says, and what a run of it counts."""

import subprocess
import sys

import pytest

from pallas_kernels import report_read, schedule, schedule_ops, schedule_run
from tests.pallas_kernels import schedule_sample as sample


@pytest.fixture(scope="module")
def program():
  return schedule.read(sample.DATA, sample.NAME)


@pytest.fixture(scope="module")
def words():
  return {0: report_read.words_in_memory(sample.TABLE, "1,0:T(4,128)(4,1)")}


def middle_of(program):
  """(first, middle, last) region of the sample's grid step."""
  (grid,) = program.regions().inside
  (body,) = grid.inside
  return body.inside


def test_a_folder_names_its_kernels():
  assert schedule.names(sample.DATA) == [sample.NAME]
  with pytest.raises(FileNotFoundError, match="sample.1"):
    schedule.read(sample.DATA, "sample")


def test_what_the_program_holds(program):
  assert len(program.bundles) == 153
  assert program.bundles[0x11].label == "LB"
  assert "/*" not in "".join(bundle.text for bundle in program.bundles)
  assert program.capacity["MATMUL"] == 4
  assert program.filled("MATMUL") == sum(program.column("MATMUL")) > 0
  assert program.filled(schedule.FILL) == program.filled(schedule.SPILL) == 0
  # Two buffers of x, one of w, two of o, the total; and the compiler's own.
  windows = 4 * 128 * (2 * 8 + 128 + 2 * 8 + 8)
  assert windows <= program.vmem_bytes <= windows + 64 * 1024


def test_regions_nest_as_in_the_source(program):
  (grid,) = program.regions().inside
  assert grid.kind == "loop"
  first, middle, last = middle_of(program)
  assert {r.kind for r in (first, middle, last)} == {"branch"}
  assert [r.kind for r in middle.inside] == ["loop"]
  assert first.inside == last.inside == []
  span = lambda region: (region.start, region.stop)
  # The compiler may start the loads of the middle region's matmul above it.
  assert program.filled("MATMUL", *span(middle)) == program.filled("MATMUL") - 1
  assert program.filled("EUP", *span(last)) == program.filled("EUP") == 1
  assert program.filled("VSTORE", *span(first)) == 1


def test_a_run_takes_the_branches_that_the_chip_would(program, words):
  run = schedule_run.run(program, words)
  first, middle, last = middle_of(program)
  (loop,) = middle.inside
  assert run.unknown == set()
  assert run.counts[first.start] == 4
  assert run.counts[middle.start] == sample.TABLE.sum() == 10
  assert run.counts[loop.start] == sample.ROUNDS * 10
  assert run.counts[last.start] == 4
  assert run.counts[0] == run.counts[-1] == 1
  assert run.bundles == sum(run.counts)


def test_steps_are_told_apart(program, words):
  run = schedule_run.run(program, words)
  first, middle, last = middle_of(program)
  times = lambda region: sum(
    count
    for step, count in run.steps.items()
    if region.start in dict(step.entered)
  )
  assert (times(first), times(middle), times(last)) == (4, 10, 4)
  # 16 steps of the grid, and those that only fill and drain its pipeline.
  body = first.start, middle.start, last.start
  assert sum(run.steps.values()) == 16 + 2
  assert sum(n for step, n in run.steps.items() if step.entered) == 16
  assert set(dict(run.steady.entered)) & set(body) == {middle.start}
  inside = sum(step.bundles * count for step, count in run.steps.items())
  (grid,) = program.regions().inside
  assert inside == run.bundles - grid.start - (len(run.counts) - grid.stop)


def test_the_core_is_where_the_matmuls_are(program, words):
  run = schedule_run.run(program, words)
  _, middle, _ = middle_of(program)
  assert run.core(program) == middle.inside[0]


def test_copies_are_counted_in_bytes(program, words):
  run = schedule_run.run(program, words)
  # Each block of x once, w once though every step names it; o once a row.
  assert run.read_bytes == 4 * (32 * 512 + 128 * 128)
  assert run.written_bytes == 4 * 32 * 128


def test_what_is_unknown_runs_and_is_told(program):
  run = schedule_run.run(program)
  _, middle, _ = middle_of(program)
  assert run.counts[middle.start] == 16
  (branch,) = run.unknown
  assert program.branches[branch].to == middle.stop


def test_a_table_of_zeros_skips_every_middle(program):
  run = schedule_run.run(program, {0: [0] * 128})
  first, middle, _ = middle_of(program)
  assert run.counts[middle.start] == 0
  assert run.counts[first.start] == 4


def test_a_run_without_end_is_an_error(program, words):
  with pytest.raises(ValueError, match="sample.1: runs on after"):
    schedule_run.run(program, words, limit=1000)


def test_files_of_different_kernels_are_refused():
  read = lambda kind: next(sample.DATA.glob(f"*{kind}*")).read_text()
  units = read("utilization")
  one_less = "\n".join(units.splitlines()[:-1])
  with pytest.raises(ValueError, match="153 bundles in the program, 152 in"):
    schedule.parse("x", read("final_bundles"), one_less)
  with pytest.raises(ValueError, match="not a utilization file"):
    schedule.parse("x", read("final_bundles"), "")


def program_of(*lines, units="MATMUL\n1\n"):
  """A schedule of bundles without slots."""
  text = "\n".join(f" {i:#x} {line}" for i, line in enumerate(lines)) + "\n"
  rows = "".join("0\n" for _ in lines)
  return schedule.parse(
    "made", text, f"== CAPACTIY:\n{units}== UTILIZATION:\n{rows}"
  )


def test_a_loop_with_a_counter_in_a_register():
  program = program_of(
    "  :  { %s1_s0 = smov.u32 5 }",
    "LB: > { %s2_s0 = sphi %s1_s0, %s3_s0  ;;  %s3_s0 = sadd.s32 4294967295,"
    " %s2_s0 } /* Start region 7 */",
    "  : > { %p4_p0 = scmp.gt.s32.totalorder %s3_s0, 0 }",
    "  : > { %9 = sbr.rel (%p4_p0) target = $region7 }",
    *["  : > {}"] * 4,
    "  :  {}",
  )
  assert schedule_run.run(program).counts == [1] + [5] * 7 + [1]


def test_each_core_takes_its_own_branch():
  program = program_of(
    "  :  { %s1_s0 = sld [smem:[#allocation0]] }",
    "  :  { %p2_p0 = scmp.ne.s32.totalorder %s1_s0, 0 }",
    "  :  { %9 = sbr.rel (%p2_p0) target = $region4 }",
    *["  :  {}"] * 4,
    "  :  {} /* Start region 3 :: End region 3 */",
    "PF:  {} /* Start/End empty region 4 */",
  )
  counts = [schedule_run.run(program, core=core).counts for core in (0, 1)]
  assert counts == [[1] * 9, [1] * 7 + [0, 1]]


@pytest.mark.parametrize(
  ("instruction", "wanted"),
  [
    ("sadd.s32 2147483647, 1", -(2**31)),
    ("sshrl.u32 4294967295, 28", 15),
    ("sshra.s32 4294967280, 2", -4),
    ("sshll.u32 3, 31", -(2**31)),
    ("smul.u32 65537, 65537", 131073),
    ("sand.u32 24, 8", 8),
    ("scmp.lt.s32.totalorder 4294967295, 0", True),
    ("scmp.lt.u32.totalorder 4294967295, 0", False),
    ("scalar_select %p9_p0, 3, 4", None),
    ("por %p9_p0, 1", True),
    ("por %p9_p0, 0", None),
    ("pnand %p9_p0, 0", True),
    ("pneg 1", False),
    ("smov.u32 (0, 7), 5", None),
    ("unheard.of 1, 2", None),
  ],
)
def test_instructions(instruction, wanted):
  (op,) = schedule_ops.parse_bundle(f" %s1_s0 = {instruction}")
  machine = schedule_run._Machine(program_of("  :  {}"), {})
  assert schedule_ops.compute(op.name, list(map(machine.value, op.inputs))) == (
    wanted
  )


@pytest.mark.parametrize(
  "text",
  [
    " (!%p7_p3), [smem:[#allocation7 + %s9_s0]]",
    " [smem:[#allocation7 + %s9_s0]] (!%p7_p3)",
  ],
)
def test_a_guard_stands_before_or_behind_an_address(text):
  """It is no part of the address."""
  (op,) = schedule_ops.parse_bundle(f" %s1_s0 = sld{text}")
  assert (op.negated, op.guard, op.otherwise) == (True, "%p7_p3", "")
  assert op.inputs == (schedule_ops.Pointer("#allocation7", 0), "%s9_s0")


@pytest.mark.parametrize(("guard", "wanted"), [("1", 6), ("0", 5), ("8", 6)])
def test_a_guarded_move_keeps_the_other_value(guard, wanted):
  program = program_of(
    f"  :  {{ %s1_s0 = smov.u32 5  ;;  %p2_p0 = scmp.ne.s32.totalorder {guard},"
    " 0 }",
    "  :  { %s3_s0 = smov.u32 (%p2_p0, %s1_s0), 6 }",
  )
  machine = schedule_run._Machine(program, {})
  machine.run(100)
  assert machine.value("%s3_s0") == wanted


def test_the_command_line_needs_no_jax():
  code = (
    "import sys;"
    "from pallas_kernels import schedule, schedule_run;"
    "schedule.main(['schedule', sys.argv[1], 'sample']);"
    "assert 'jax' not in sys.modules"
  )
  shown = subprocess.run(
    [sys.executable, "-c", code, str(sample.DATA)],
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  assert "sample.1: 153 bundles" in shown
  assert [line.split()[0] for line in shown.strip().splitlines()[2:]] == [
    "kernel",
    "loop",
    "branch",
    "branch",
    "branch",
    "loop",
    "branch",
  ]


@pytest.mark.tpu_compiler
def test_the_compiler_still_writes_what_the_parser_reads():
  code = """
import jax
from pallas_kernels import aot, report, schedule, schedule_run
from tests.pallas_kernels import schedule_sample as sample
with report.dump_folder() as folder:
  aot.compile_for("v6e:2x2", sample.call, *sample.arguments())
  program = schedule.read(folder, sample.NAME)
run = schedule_run.run(program)
(grid,) = program.regions().inside
(body,) = grid.inside
print([run.counts[region.start] for region in body.inside])
print(run.read_bytes, run.written_bytes, len(run.unknown))
"""
  shown = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  ).stdout
  read = 4 * (32 * 512 + 128 * 128)
  assert shown.splitlines() == ["[4, 16, 4]", f"{read} {4 * 32 * 128} 1"]
