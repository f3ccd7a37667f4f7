"""A program's time from its schedule, on programs written by hand.

Clock and bandwidths are 1, so that seconds are cycles and bytes.
"""

import jax
import pytest
from jax.sharding import AxisType

from plan import cycles
from plan.scopes import Scope, Scopes
from sharding import hlo
from sharding.hlo_text import Module

RATES = cycles.Rates(clock=1.0, hbm=1.0, links={"data": 1.0, "fsdp": 0.5})
GROUPS = {"data": "{{0,4},{1,5},{2,6},{3,7}}", "fsdp": "{{0,1,2,3},{4,5,6,7}}"}


@pytest.fixture(scope="module")
def mesh():
  return jax.make_mesh(
    (2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
  )


def work(name, seconds, op_name="f/mul"):
  """A fusion of so many cycles."""
  return (
    f"  %{name} = u8[60]{{0}} fusion(%p), kind=kLoop, calls=%fused,"
    f' metadata={{op_name="{op_name}"}},'
    f' backend_config={{"estimated_cycles":"{seconds}"}}'
  )


def start(name, size, axis="data"):
  """Starts a permute of so many bytes; over fsdp each takes two seconds."""
  pairs = {"data": "{{0,4},{4,0}}", "fsdp": "{{0,1},{1,0}}"}[axis]
  return (
    f"  %{name} = (u8[{size}]{{0}}, u8[{size}]{{0}})"
    f" collective-permute-start(%p{size}), source_target_pairs={pairs}"
  )


def done(name):
  return (
    f"  %{name}.done = u8[60]{{0}} collective-permute-done(%{name}),"
    " channel_id=1"
  )


def program(*lines, more=""):
  sizes = (10, 30, 60, 100)
  params = [f"  %p{n} = u8[{n}]{{0}} parameter({n})" for n in sizes]
  entry = ["ENTRY %main (p: u8[60]) -> u8[60] {", *params]
  entry += ["  %p = u8[60]{0} parameter(0)", *lines, "}"]
  fused = "%fused (a: u8[60]) -> u8[60] {\n  %a = u8[60]{0} parameter(0)\n}\n"
  return "HloModule m\n" + fused + more + "\n".join(entry)


def measure(text, mesh, kernels=None):
  module = Module(text)
  found = hlo.collectives(module, mesh)
  return cycles.times(module, found, RATES, kernels or {})


def test_work_between_start_and_end_hides_as_much_as_it_takes(mesh):
  lines = start("s", 100), work("a", 30), work("b", 20), done("s")
  times, line = measure(program(*lines), mesh)
  # 100 s on the link, 50 of which pass beside work.
  assert line.waits == {frozenset({"data"}): 50.0}
  assert times == cycles.Times(hidden=100.0, estimate=100.0, exposed=150.0)
  assert line.compute == 50.0 and line.seconds == 100.0


@pytest.mark.parametrize(
  ("before", "inside", "after"), [(50, 0, 0), (0, 100, 7), (5, 130, 0)]
)
def test_the_estimate_is_between_the_bounds(mesh, before, inside, after):
  lines = [work("a", before), start("s", 100), work("b", inside), done("s")]
  times, _ = measure(program(*lines, work("c", after)), mesh)
  waits = max(0, 100 - inside)
  total = before + inside + after
  assert times.estimate == total + waits
  assert times.hidden == max(total, 100)
  assert times.exposed == total + 100


def test_what_shares_a_link_takes_turns(mesh):
  both = start("s", 60), start("t", 60), work("a", 60), done("s"), done("t")
  times, line = measure(program(*both), mesh)
  assert line.busy == {"data": 120.0} and times.estimate == 120.0
  # Another axis has links of its own: 30 bytes at half a byte a second.
  apart = start("s", 60), start("t", 30, "fsdp"), work("a", 60), done("s")
  times, line = measure(program(*apart, done("t")), mesh)
  assert times.estimate == times.hidden == 60.0
  assert not line.waits.total() and line.sent.total() == 120.0


def test_what_is_not_asynchronous_is_waited_for(mesh):
  whole = (
    "  %r = u8[60]{0} all-reduce(%p60), channel_id=1,"
    f" replica_groups={GROUPS['fsdp']}, to_apply=%fused"
  )
  times, line = measure(program(work("a", 10), whole, work("b", 10)), mesh)
  seconds = 2 * 3 / 4 * 60 / 0.5
  assert line.waits == {frozenset({"fsdp"}): seconds}
  assert times == cycles.Times(seconds, 20 + seconds, 20 + seconds)


def loop(trips, *lines):
  """A `while` that runs the lines, and what it calls."""
  body = "\n".join(
    ["%body (p: u8[60]) -> u8[60] {", "  %p = u8[60]{0} parameter(0)"]
    + ["  %p10 = u8[10]{0} parameter(1)", *lines, "}"]
  )
  condition = (
    "%cond (q: s32[]) -> pred[] {\n  %q = s32[] parameter(0)\n"
    f"  %n = s32[] constant({trips})\n"
    "  %lt = pred[] compare(%q, %n), direction=LT\n}\n"
  )
  call = "  %w = u8[60]{0} while(%p), condition=%cond, body=%body"
  return call, f"{body}\n{condition}"


def test_loops_multiply_all(mesh):
  inner = start("s", 10), work("a", 4), done("s"), work("k", 0)
  call, more = loop(7, *inner)
  text = program(work("b", 3), call, more=more)
  times, line = measure(text, mesh, kernels={"k": 5.0})
  # A trip: 10 on the link, of which 4 are hidden, then the kernel.
  assert times.estimate == 3 + 7 * (10 + 5)
  assert line.compute == 3 + 7 * 9 and line.kernels == {"k": 7}
  assert line.waits.total() == 7 * 6
  assert times.exposed == 3 + 7 * (4 + 5 + 10)
  by_name = {scope.name: seconds for scope, seconds in line.ops.items()}
  assert by_name == {"f/mul": 3 + 7 * 9}


def test_copies_take_the_memory_and_the_longest_branch_counts(mesh):
  copy = (
    "  %c = (u8[60]{0:S(1)}, u8[60]{0}, u32[]) copy-start(%p)\n"
    "  %c.done = u8[60]{0:S(1)} copy-done(%c)"
  )
  branch = lambda name, line: (
    f"%{name} (p: u8[60]) -> u8[60] {{\n  %p = u8[60]{{0}} parameter(0)\n"
    f"{line}\n}}\n"
  )
  more = branch("short", work("a", 20)) + branch("long", work("b", 30))
  call = (
    "  %x = u8[60]{0} conditional(%p, %p), branch_computations={%short, %long}"
  )
  times, line = measure(program(copy, call, more=more), mesh)
  assert line.copies == 60.0 and line.compute == 30.0
  assert times == cycles.Times(90.0, 90.0, 90.0)
  # To the host: no rate is known, so it is counted and not timed.
  host = copy.replace("S(1)", "S(5)")
  times, line = measure(program(host, call, more=more), mesh)
  assert line.host_bytes == 60.0 and times.estimate == 30.0


@pytest.mark.parametrize(
  ("path", "phase", "name"),
  [
    ("jit(s)/while/body/closed_call/jvp()/block/dot", "forward", "block/dot"),
    ("jit(s)/transpose(jvp())/while/body/block/dot", "backward", "block/dot"),
    (
      "jit(s)/transpose(jvp())/checkpoint/rematted_computation/block/dot",
      "again",
      "block/dot",
    ),
    ("jit(s)/mul", "", "mul"),
    ("", "", "a"),
  ],
)
def test_where_an_instruction_is_from(path, phase, name):
  module = Module(program(work("a.7", 1, path)))
  found = Scopes(module).of(module.computations["main"][-1])
  assert found == Scope(phase, name, "")


def test_the_line_of_an_instruction(mesh):
  """Wrappers of a matmul are passed over for who calls them."""
  home = __file__.removesuffix("tests/plan/test_cycles.py")
  tables = f"""
FileNames
1 "{home}model/mlp.py"
2 "{home}model/linear.py"
3 "/elsewhere/jax.py"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=42}}
2 {{file_name_id=2 function_name_id=1 line=7}}
3 {{file_name_id=3 function_name_id=1 line=8}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}

"""
  line = work("a", 1).replace('mul"', 'mul" stack_frame_id=3')
  text = program(line).replace("HloModule m\n", f"HloModule m\n{tables}")
  module = Module(text)
  found = Scopes(module).of(module.computations["main"][-1])
  assert found == Scope("", "f/mul", "model/mlp.py:42")
