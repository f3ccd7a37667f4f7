"""The collectives of a small step on a TPU, recipe by recipe, as recorded.

  python -m tests.train.golden

records them anew in golden.json for the jax that is installed, and keeps what
is there of others. Read the diff: what is new must be wanted.
"""

import dataclasses
import json
import pathlib

import jax

from model.config import ModelConfig, Moe, Rope
from pallas_kernels.aot import topology_devices
from sharding.axes import MeshConfig
from sharding.hlo import collectives, summary
from sharding.mesh import make_mesh
from tests.train import programs

FILE = pathlib.Path(__file__).with_name("golden.json")
TOPOLOGY = "v5e:2x4"
# No two sizes alike, each a multiple of what kernels and meshes want.
MODEL = ModelConfig(
  vocab_size=640,
  num_layers=3,
  embed_dim=256,
  num_heads=16,
  num_kv_heads=8,
  head_dim=128,
  mlp_dim=384,
  max_positions=1024,
  rope=Rope(theta=1e4),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """A way to split a step over eight devices.

  Attributes:
    mesh: devices along each axis.
    zero_stage: see `sharding/zero.py`.
    moe: experts of the model.
  """

  mesh: MeshConfig
  zero_stage: int = 3
  moe: Moe | None = None


RECIPES = {
  "data": Recipe(mesh=MeshConfig(data=8, fsdp=1)),
  "fsdp": Recipe(mesh=MeshConfig(fsdp=8)),
  "zero-2": Recipe(mesh=MeshConfig(fsdp=8), zero_stage=2),
  "tensor": Recipe(mesh=MeshConfig(fsdp=1, tensor=8)),
  "fsdp x tensor": Recipe(mesh=MeshConfig(fsdp=4, tensor=2)),
  "context": Recipe(mesh=MeshConfig(fsdp=2, context=4)),
  "expert": Recipe(
    mesh=MeshConfig(fsdp=2, expert=4), moe=Moe(num_experts=8, num_active=2)
  ),
  "pipeline": Recipe(mesh=MeshConfig(pipeline=2, fsdp=4)),
}


def counted(name: str) -> dict[str, list[int]]:
  """Compiles a recipe: "kind dtypes over axes" -> [calls, bytes sent]."""
  recipe = RECIPES[name]
  mesh = make_mesh(recipe.mesh, devices=topology_devices(TOPOLOGY))
  config = dataclasses.replace(MODEL, moe=recipe.moe)
  made = programs.make(
    config,
    mesh,
    16,
    precision="bf16",
    remat="block",
    accumulation=2,
    zero_stage=recipe.zero_stage,
  )
  return summary(collectives(made.lower().compile().as_text(), mesh))


def version() -> str:
  """Of jax, as recorded: "0.10"."""
  return ".".join(jax.__version__.split(".")[:2])


def recorded() -> dict[str, dict[str, dict[str, list[int]]]]:
  """Version -> recipe -> what `counted` gave."""
  return json.loads(FILE.read_text()) if FILE.exists() else {}


def main():
  """Records all recipes for this version."""
  table = recorded() | {version(): {name: counted(name) for name in RECIPES}}
  lines = [
    f' "{of}": {{\n'
    + ",\n".join(
      f'  "{name}": {{\n'
      + ",\n".join(
        f"   {json.dumps(key)}: {json.dumps(value)}"
        for key, value in ops.items()
      )
      + "\n  }"
      for name, ops in recipes.items()
    )
    + "\n }"
    for of, recipes in sorted(table.items())
  ]
  FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
  main()
