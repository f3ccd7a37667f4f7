"""The cells of the equivalence matrix: which meshes, with which settings.

A cell is a mesh and a value of every factor that has a meaning on it. `whole`
is all of them; `cover` a part in which every mesh meets every value of every
factor with two values, and each value of the others meets many meshes. A new
mesh axis joins by a line in `SIZES`, a new setting by a line in `FACTORS`.
"""

import dataclasses
import itertools

Mesh = tuple[tuple[str, int], ...]

# Devices along an axis: alone, as the first and as the second of a pair. A
# pair's differ, so that a division by the wrong one shows.
SIZES = {
  "pipeline": (2, 2, 2),
  "data": (8, 2, 4),
  "fsdp": (8, 2, 4),
  "expert": (8, 2, 4),
  "context": (8, 2, 4),
  "tensor": (4, 2, 4),
}
TRIPLES = (
  ("data", "fsdp", "tensor"),
  ("fsdp", "context", "tensor"),
  ("expert", "context", "tensor"),
  ("pipeline", "data", "tensor"),
  ("pipeline", "expert", "fsdp"),
)


@dataclasses.dataclass(frozen=True)
class Factor:
  """A setting that must not change what is computed.

  Attributes:
    values: what it may be.
    axis: the mesh axis without which it means nothing; None: it always does.
  """

  values: tuple
  axis: str | None = None


DENSE, EXPERTS = ("gqa", "mha"), ("moe", "moe_capacity")
MODELS = (DENSE[0], *EXPERTS, DENSE[1])

FACTORS = {
  "model": Factor(MODELS),
  "packed": Factor((True, False)),
  "optimizer": Factor(("sgd", "adamw")),
  "accumulation": Factor((1, 4)),
  "remat": Factor(("none", "block")),
  "context": Factor(("ring", "all_gather", "ulysses"), "context"),
  "zero_stage": Factor((1, 2, 3), "fsdp"),
  "embed": Factor(("fsdp", "fsdp context"), "context"),  # a rule
  # "interleaved" is in `others`: it takes micro-batches in groups only.
  "schedule": Factor(("gpipe", "1f1b", "zero_bubble"), "pipeline"),
}


@dataclasses.dataclass(frozen=True)
class Cell:
  """One comparison.

  Attributes:
    mesh: (axis, devices) pairs.
    settings: (factor, value) pairs.
    loss: "pretrain", "sft" or "dpo".
    dropout: whether the model has some.
    kernels: whether the mesh runs Pallas kernels, interpreted.
  """

  mesh: Mesh
  settings: tuple[tuple[str, object], ...]
  loss: str = "pretrain"
  dropout: bool = False
  kernels: bool = False

  @property
  def name(self) -> str:
    """For people, and the id of a test."""
    mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh)
    values = " ".join(f"{key}={value}" for key, value in self.settings)
    more = f" {self.loss}" + " dropout" * self.dropout
    more += " kernels" * self.kernels
    return f"{mesh}: {values}{more}"

  @property
  def group(self) -> str:
    """Cells of a group are run in one process; they share the one device."""
    of = dict(self.settings)
    what = f"{of['model']}-{of['optimizer']}-{self.loss}"
    return f"{what}{self.dropout:d}{self.kernels:d}"


def meshes() -> list[Mesh]:
  """Every axis alone, every pair, and the triples."""
  alone = [((axis, SIZES[axis][0]),) for axis in SIZES]
  pairs = [
    ((first, SIZES[first][1]), (second, SIZES[second][2]))
    for first, second in itertools.combinations(SIZES, 2)
  ]
  triples = [tuple((axis, 2) for axis in triple) for triple in TRIPLES]
  return [*alone, *pairs, *triples]


def factors(mesh: Mesh) -> dict[str, tuple]:
  """The values of all factors that mean something on a mesh."""
  axes = dict(mesh)
  return {
    name: factor.values
    for name, factor in FACTORS.items()
    if factor.axis is None or factor.axis in axes
  }


def cover() -> list[Cell]:
  """Two cells a mesh, complements of each other, and those of `others`."""
  cells = []
  for number, mesh in enumerate(meshes()):
    for turn in range(2):
      # Factors change at different paces, so that their values meet too.
      values = {
        name: choices[
          (number // 2**i + turn + number * (len(choices) > 2)) % len(choices)
        ]
        for i, (name, choices) in enumerate(factors(mesh).items())
      }
      cells.append(Cell(mesh, tuple(values.items())))
  return cells + others()


def whole() -> list[Cell]:
  """Every mesh with every combination, and those of `others`.

  A dense model and one with experts, of two kinds in turn. Factors that only
  some meshes have take turns too.
  """
  cells = []
  for number, mesh in enumerate(meshes()):
    choices = factors(mesh)
    always = {
      name: values
      for name, values in choices.items()
      if FACTORS[name].axis is None and name != "model"
    }
    for turn, values in enumerate(itertools.product(*always.values())):
      turns = {
        name: of[(number + turn // 2**i) % len(of)]
        for i, (name, of) in enumerate(choices.items())
        if name not in always
      }
      for models in (DENSE, EXPERTS):
        model = models[(number + turn) % 2]
        values_of = dict(zip(always, values, strict=True))
        found = choices | turns | values_of | dict(model=model)
        cells.append(Cell(mesh, tuple(found.items())))
  return list(dict.fromkeys(cells + others()))


def others() -> list[Cell]:
  """What only a few cells need to show: losses, dropout, Pallas kernels."""
  settings = {name: factor.values[-1] for name, factor in FACTORS.items()}

  def cell(axes, loss="pretrain", dropout=False, kernels=False, **changes):
    mesh = tuple((axis, 2) for axis in axes)
    chosen = {name: (settings | changes)[name] for name in factors(mesh)}
    return Cell(mesh, tuple(chosen.items()), loss, dropout, kernels)

  first, second, _, stages, expert_stages = TRIPLES
  kernels = dict(dropout=True, kernels=True, model="gqa", packed=True)
  return [
    cell(first, "sft"),
    cell(second, "sft", context="ring"),
    cell(first, "dpo", packed=False),
    cell(second, "dpo", packed=False),
    cell(stages, "dpo", packed=False, schedule="1f1b"),
    cell(second, dropout=True),
    cell(["data", "expert"], "dpo", packed=False, model="moe"),
    cell(["data", "expert"], **kernels | dict(model="moe")),
    cell(first, zero_stage=1),
    cell(stages, dropout=True, schedule="interleaved"),
    cell(expert_stages, schedule="interleaved", model="gqa"),
    *[cell([axis], **kernels) for axis in ("data", "fsdp", "tensor")],
    cell(["context"], context="ring", accumulation=1, **kernels),
  ]
