"""A function, the gradient of its input and those of its weights, in three.

Autodiff gives both gradients at once, and calling it twice computes the way of
cotangents through the layers twice. Here one traced program of values and
gradients is cut into three that share what they computed: `forward` hands
residuals to `backward` and to `weight`, and `backward` hands cotangents to
`weight`, which is left with products of the two. A scan over layers, in
whose body both gradients arise, becomes two scans.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

Tree = Any
Var = Any  # A variable of a jaxpr, or an object that stands for one.


@dataclasses.dataclass(frozen=True)
class Split:
  """The three parts, of `function(weights, x, *rest) -> (y, loss, aux)`.

  Attributes:
    forward: (weights, x, rest) -> (y, loss, aux), residuals.
    backward: (weights, rest, residuals, dy) -> dx, cotangents. The loss, a
      scalar that is added to others, has the cotangent 1.
    weight: (weights, rest, residuals, cotangents) -> gradients of the weights.
  """

  forward: Callable[[Tree, jax.Array, Tree], tuple[Tree, list[jax.Array]]]
  backward: Callable[
    [Tree, Tree, list[jax.Array], jax.Array], tuple[jax.Array, list[jax.Array]]
  ]
  weight: Callable[[Tree, Tree, list[jax.Array], list[jax.Array]], Tree]


def split(function: Callable, weights: Tree, x: jax.Array, rest: Tree) -> Split:
  """Traces a function and its gradients, and cuts them apart.

  Args:
    function: (weights, x, *rest) -> (y, loss, aux); y is placed and shaped
      like x, loss is a float32 scalar, aux has no gradient.
    weights: its weights, arrays or their shapes.
    x: its input.
    rest: a tuple of what needs no gradient and is there in all three parts.
  """

  def joint(weights, x, rest, dy):
    def values(weights, x):
      y, loss, aux = function(weights, x, *rest)
      return (y, loss), aux

    (y, loss), vjp, aux = jax.vjp(values, weights, x, has_aux=True)
    dweights, dx = vjp((dy, jnp.ones((), jnp.float32)))
    return (y, loss, aux), dx, dweights

  closed, shapes = jax.make_jaxpr(joint, return_shape=True)(weights, x, rest, x)
  jaxpr, leaves = closed.jaxpr, jax.tree.leaves
  out_tree = jax.tree.structure(shapes[0])
  weights_tree = jax.tree.structure(shapes[2])
  w_in, x_in, rest_in, dy_in = _parts_of(
    jaxpr.invars, len(leaves(weights)), 1, len(leaves(rest)), 1
  )
  ops, outputs = _program(jaxpr)
  values, dx_out, dw_out = _parts_of(
    outputs, out_tree.num_leaves, 1, weights_tree.num_leaves
  )
  known = [*w_in, *rest_in]
  consts = dict(zip(jaxpr.constvars, closed.consts))
  free, ops = _without_free(ops, {*known, *consts})

  # What does not wait for dy is of the forward pass.
  late = set(dy_in)
  forward_ops, other_ops = [], []
  for op in ops:
    if late.intersection(op.inputs):
      late |= set(op.outputs)
      other_ops.append(op)
    else:
      forward_ops.append(op)
  backward_ops, weight_ops = _divide(other_ops, dx_out, free)
  weight_ops = _live(weight_ops, dw_out)
  later = [*dx_out, *dw_out, *(v for op in other_ops for v in op.inputs)]
  forward_ops = _live(forward_ops, [*values, *later])

  made = _made(forward_ops) | set(x_in)
  residuals = _used(made, [*backward_ops, *weight_ops], [*dx_out, *dw_out])
  made = _made(backward_ops) | set(dy_in)
  cotangents = _used(made, weight_ops, dw_out)

  def run(ops, env, outputs):
    return _run(ops, consts | env, outputs, free)

  def here(weights, rest):
    return dict(zip(known, leaves((weights, rest))))

  def forward(weights, x, rest):
    env = here(weights, rest) | {x_in[0]: x}
    found = run(forward_ops, env, [*values, *residuals])
    out = out_tree.unflatten(found[: len(values)])
    return out, found[len(values) :]

  def backward(weights, rest, saved, dy):
    env = here(weights, rest) | dict(zip(residuals, saved)) | {dy_in[0]: dy}
    dx, *found = run(backward_ops, env, [*dx_out, *cotangents])
    return dx, found

  def weight(weights, rest, saved, kept):
    env = here(weights, rest)
    env |= dict(zip(residuals, saved)) | dict(zip(cotangents, kept))
    return weights_tree.unflatten(run(weight_ops, env, dw_out))

  return Split(forward, backward, weight)


@dataclasses.dataclass(frozen=True, eq=False)
class _Op:
  """A step of a program.

  Attributes:
    inputs: variables and literals.
    outputs: variables.
    run: values of the inputs -> values of the outputs.
    scan: the equation, where it is a scan.
  """

  inputs: Sequence[Var]
  outputs: Sequence[Var]
  run: Callable[..., Sequence[Any]]
  scan: Any = None


# Equations that only call a program: they are written out.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")


def _program(jaxpr, names: dict | None = None) -> tuple[list[_Op], list]:
  """A program with all that it calls written out.

  Args:
    jaxpr: the program.
    names: of its inputs and constants, where it is called.

  Returns:
    Its operations and the variables that it returns.
  """
  ops = []

  def name(v):
    if isinstance(v, core.Literal):
      ops.append(_Op((), [given := object()], lambda: [v.val]))
      return given
    return v if names is None else names.setdefault(v, object())

  for eqn in jaxpr.eqns:
    inputs = [name(v) for v in eqn.invars]
    outputs = [name(v) for v in eqn.outvars]
    if eqn.primitive.name in _CALLS:
      called, consts = _opened(eqn.params["jaxpr"])
      inner = dict(zip(called.invars, inputs))
      for v, x in zip(called.constvars, consts):
        inner[v] = object()
        ops.append(_Op((), [inner[v]], lambda x=x: [x]))
      inner_ops, ends = _program(called, inner)
      ops += inner_ops
      ops += [
        _Op([end], [output], lambda value: [value])
        for end, output in zip(ends, outputs)
      ]
    else:
      is_scan = eqn.primitive.name == "scan"
      ops.append(_Op(inputs, outputs, _bind(eqn), eqn if is_scan else None))
  return ops, [name(v) for v in jaxpr.outvars]


def _opened(jaxpr) -> tuple[Any, Sequence]:
  """A program that another holds, and its constants."""
  return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def _scan_sizes(params: dict) -> tuple[int, int]:
  """The number of constants and of carries of a scan."""
  if "num_consts" in params:
    return params["num_consts"], params["num_carry"]
  # From JAX 0.11 on.
  consts, carry, _ = params["ft_in"].unpack()
  return len(list(consts)), len(list(carry))


def _bind(eqn) -> Callable:
  """The operation of an equation."""

  def run(*values):
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
      out = eqn.primitive.bind(*values, **params)
    return out if eqn.primitive.multiple_results else [out]

  return run


def _without_free(ops: list[_Op], known: set) -> tuple[dict, list[_Op]]:
  """Takes out what depends on nothing but `known`: it is computed anew.

  Returns:
    Each variable that is free -> what gives it (None: it is known), and the
    other ops.
  """
  free, others = dict.fromkeys(known), []
  for op in ops:
    if all(v in free for v in op.inputs):
      free |= dict.fromkeys(op.outputs, op)
    else:
      others.append(op)
  return free, others


def _divide(
  ops: list[_Op], wanted: Iterable[Var], free: dict
) -> tuple[list[_Op], list[_Op]]:
  """Parts what gives the wanted variables from the rest."""
  needed = set(wanted)
  first, second = [], []
  for op in reversed(ops):
    mine = needed.intersection(op.outputs)
    if not mine:
      second.append(op)
      continue
    if op.scan is not None and len(mine) < len(op.outputs):
      op, later = _divide_scan(op, mine, free)
      second.append(later)
    first.append(op)
    needed |= set(op.inputs)
  return first[::-1], second[::-1]


def _divide_scan(op: _Op, wanted: set, free: dict) -> tuple[_Op, _Op]:
  """Cuts a scan in two; the second reads what the first wrote down."""
  params = op.scan.params
  body, body_consts = _opened(params["jaxpr"])
  num_consts, num_carry = _scan_sizes(params)
  sizes = num_consts, num_carry, len(body.invars) - num_consts - num_carry
  consts_in, carry_in, xs_in = _parts_of(body.invars, *sizes)
  consts, carry, xs = _parts_of(op.inputs, *sizes)
  out_sizes = num_carry, len(body.outvars) - num_carry
  carried, ys = _parts_of(op.outputs, *out_sizes)

  outer = dict(zip(body.invars, op.inputs))
  known = [v for v in (*consts_in, *xs_in) if outer[v] in free]
  given = dict(zip(body.constvars, body_consts))
  ops, ends = _program(body)
  carry_out, ys_out = _parts_of(ends, *out_sizes)
  inner_free, ops = _without_free(ops, {*known, *given})

  # A carry is wanted if it is read by what gives a wanted one.
  is_wanted = [v in wanted for v in carried]
  want_ys = [v in wanted for v in ys]
  while True:
    targets = _chosen(carry_out, is_wanted) + _chosen(ys_out, want_ys)
    first, second = _divide(ops, targets, inner_free)
    reads = {v for o in first for v in o.inputs} | set(targets)
    more = [w or v in reads for w, v in zip(is_wanted, carry_in)]
    if more == is_wanted:
      break
    is_wanted = more
  late = [not w for w in is_wanted]
  late_ys = [not w for w in want_ys]
  late_targets = _chosen(carry_out, late) + _chosen(ys_out, late_ys)
  second = _live(second, late_targets)
  made = _made(first) | set(_chosen(carry_in, is_wanted))
  notes = _used(made, second, late_targets)
  note_names = [object() for _ in notes]

  def scan(ops, mask, targets, num_carry, notes_read):
    """One of the two, which reads no more than it must."""
    ops = _live(ops, targets)
    reads = {v for o in ops for v in o.inputs} | set(targets)
    reads |= _free_reads(reads, inner_free)
    groups = consts_in, _chosen(carry_in, mask), xs_in
    outside = consts, _chosen(carry, mask), xs
    read = lambda i, items: [x for v, x in zip(groups[i], items) if v in reads]
    fixed_in, scanned_in = read(0, consts_in), [*read(2, xs_in), *notes_read]
    num_fixed, num_init = len(fixed_in), len(groups[1])

    def run(*values):
      fixed, init, scanned = _parts_of(
        values, num_fixed, num_init, len(scanned_in)
      )
      here = given | dict(zip(fixed_in, fixed))

      def step(carry, scanned):
        env = here | dict(zip(groups[1], carry))
        env |= dict(zip(scanned_in, scanned))
        found = _run(ops, env, targets, inner_free)
        return found[:num_carry], found[num_carry:]

      carried, out = jax.lax.scan(
        step,
        init,
        scanned,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
      )
      return [*carried, *out]

    inputs = [*read(0, consts), *outside[1], *read(2, xs)]
    return inputs + (note_names if notes_read else []), run

  num = sum(is_wanted)
  inputs, run = scan(first, is_wanted, [*targets, *notes], num, [])
  outputs = _chosen(carried, is_wanted) + _chosen(ys, want_ys) + note_names
  earlier = _Op(inputs, outputs, run)
  inputs, run = scan(second, late, late_targets, len(late) - num, notes)
  outputs = _chosen(carried, late) + _chosen(ys, late_ys)
  return earlier, _Op(inputs, outputs, run)


def _live(ops: list[_Op], outputs: Iterable[Var]) -> list[_Op]:
  """The ops that the outputs depend on."""
  live, reads = [], set(outputs)
  for op in reversed(ops):
    if reads.intersection(op.outputs):
      live.append(op)
      reads |= set(op.inputs)
  return live[::-1]


def _free_reads(variables: Iterable[Var], free: dict) -> set:
  """All that is read to compute the free ones of some variables."""
  found, todo = set(), list(variables)
  while todo:
    op = free.get(todo.pop())
    for v in op.inputs if op is not None else ():
      if v not in found:
        found.add(v)
        todo.append(v)
  return found


def _run(ops: list[_Op], env: dict, outputs, free: dict) -> list:
  """Runs a program; what is free is computed where it is first read."""
  env = dict(env)

  def read(v):
    if v not in env:
      op = free[v]
      env.update(zip(op.outputs, op.run(*map(read, op.inputs))))
    return env[v]

  for op in ops:
    env.update(zip(op.outputs, op.run(*map(read, op.inputs))))
  return [read(v) for v in outputs]


def _made(ops: Iterable[_Op]) -> set:
  return {v for op in ops for v in op.outputs}


def _used(made: set, ops: list[_Op], outputs: Iterable[Var]) -> list:
  """Which of the variables that were made are read later, in order."""
  reads = [v for op in ops for v in op.inputs] + list(outputs)
  return list(dict.fromkeys(v for v in reads if v in made))


def _chosen(items: Sequence, mask: Sequence[bool]) -> list:
  return [item for item, wanted in zip(items, mask) if wanted]


def _parts_of(items: Sequence, *sizes: int) -> list[list]:
  """Cuts a list into lists of these sizes."""
  parts, items = [], list(items)
  for size in sizes:
    parts.append(items[:size])
    items = items[size:]
  assert not items
  return parts
