"""The alphabet of the code base: einsum letters, logical dims, mesh axes.

`axis` is a mesh axis, `dim` is a tensor dimension, `num_x` is a count. This
file imports no JAX, so that configs stay cheap to import.
"""

import dataclasses

# One letter has one meaning everywhere.
LETTERS = {
  "B": "batch",
  "T": "query position",
  "S": "key position",
  "D": "model (embed)",
  "F": "feed-forward",
  "N": "query heads",
  "K": "key/value heads",
  "G": "query heads per key/value head, N / K",
  "H": "head dimension",
  "V": "vocabulary",
  "E": "experts",
  "C": "expert capacity",
  "L": "layers",
  "P": "pipeline stages",
}

# Outermost first: what is last talks most and wants the fastest links.
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")

# The mesh axes over which the rows of a batch are split.
BATCH_AXES = ("data", "fsdp", "expert")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """Number of devices along each mesh axis; one of them may be -1 (the rest).

  Attributes:
    pipeline: stages that hold different layers.
    data: replicas of the parameters that see different rows of a batch.
    fsdp: shards of parameters and optimizer state; also splits the batch.
    expert: groups that hold different experts, and different rows of a batch;
      tokens travel between them.
    context: shards of the sequence inside attention.
    tensor: shards of heads, feed-forward and vocabulary.
  """

  pipeline: int = 1
  data: int = 1
  fsdp: int = -1
  expert: int = 1
  context: int = 1
  tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """Logical dim -> the mesh axes that split it. () leaves a dim whole.

  Weights use "embed", "mlp", "heads", "kv_heads", "head_dim", "vocab",
  "expert", "layers". Activations use "batch", "seq",
  "residual_seq" (the sequence between layers: norms and residuals are
  sequence-parallel on `tensor`), and the weight names of dims that a tensor
  product leaves split ("mlp", "heads", "kv_heads", "vocab"). The feature dim
  of an activation is written None: it is never split.
  """

  batch: tuple[str, ...] = BATCH_AXES
  seq: tuple[str, ...] = ("context",)
  residual_seq: tuple[str, ...] = ("context", "tensor")
  embed: tuple[str, ...] = ("fsdp",)
  mlp: tuple[str, ...] = ("tensor",)
  heads: tuple[str, ...] = ("tensor",)
  kv_heads: tuple[str, ...] = ("tensor",)
  head_dim: tuple[str, ...] = ()
  vocab: tuple[str, ...] = ("tensor",)
  expert: tuple[str, ...] = ("expert",)
  layers: tuple[str, ...] = ("pipeline",)
