"""The losses on eight devices, partitioned by XLA or by device, as on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.execution import Execution
from model.losses import cross_entropy, token_log_probs
from sharding.axes import MeshConfig, Rules
from sharding.mesh import make_mesh
from sharding.rules import tree_shardings
from tests.model.tiny import make
from tests.tolerances import tolerance
from tests.train import tiny as train_tiny
from train.config import OptimizerConfig

MODEL = dict(
  vocab_size=52,
  embed_dim=24,
  num_kv_heads=4,
  logit_softcap=3.0,
  logit_scale=0.7,
)
B, T = 8, 6
# Every axis that splits tokens or the head, and one that splits neither.
MESHES = {
  "data, fsdp, tensor": (MeshConfig(data=2, fsdp=2, tensor=2), Rules()),
  "context, tensor": (MeshConfig(fsdp=1, context=2, tensor=4), Rules()),
  "fsdp, expert": (MeshConfig(fsdp=4, expert=2), Rules()),
  "vocabulary where tokens are": (
    MeshConfig(fsdp=2, context=2, tensor=2),
    Rules(vocab=("context", "tensor")),
  ),
}
# XLA splits logits by rows and by vocabulary, each over axes of its own.
CASES = [(mesh, impl) for mesh in MESHES for impl in ("xla", "tpu")]
CASES.remove(("vocabulary where tokens are", "xla"))


def gradients(execution, tied):
  """Values and gradients of both losses, placed as `execution` says."""
  model = make(tied=tied, **MODEL)
  rng = np.random.default_rng(0)
  arrays = (
    jnp.asarray(rng.normal(size=(B, T, MODEL["embed_dim"])), jnp.float32),
    jnp.asarray(rng.integers(0, MODEL["vocab_size"], (B, T)), jnp.int32),
    jnp.asarray(rng.uniform(0.0, 2.0, (B, T)), jnp.float32),
  )
  if execution.mesh is not None:
    places = tree_shardings(model, execution.mesh, execution.rules)
    model = jax.device_put(model, places)

  def loss(model, hidden, targets, weights):
    total, weight, parts = cross_entropy(
      model, hidden, targets, weights, z_loss=0.1, execution=execution
    )
    # The cotangent of the sum is then not one.
    return total / weight, parts

  def log_probs(model, hidden, targets, weights):
    values = token_log_probs(
      model, hidden, targets, weights > 0.3, execution=execution
    )
    return jnp.sum(values * weights), values

  run = lambda f, **argnums: jax.jit(
    jax.value_and_grad(f, has_aux=True, **argnums)
  )(model, *arrays)
  return run(loss, argnums=(0, 1, 3)), run(log_probs, argnums=(0, 1))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def one_device(request):
  return request.param, gradients(Execution(), request.param)


@pytest.mark.parametrize(("mesh", "impl"), CASES)
def test_meshes(one_device, mesh, impl):
  config, rules = MESHES[mesh]
  execution = Execution(mesh=make_mesh(config), rules=rules, loss=impl)
  tied, want = one_device
  got = gradients(execution, tied)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, **tolerance("mesh"))


def test_the_kernels_are_refused_a_vocabulary_that_does_not_divide():
  execution = Execution(mesh=make_mesh(MeshConfig(tensor=8)), loss="tpu")
  model = make(**MODEL)
  hidden = jnp.zeros((B, T, MODEL["embed_dim"]))
  targets = jnp.zeros((B, T), jnp.int32)
  with pytest.raises(ValueError, match="'vocab', size 52.*does not divide"):
    token_log_probs(model, hidden, targets, execution=execution)


def test_a_step_with_replicas_of_the_weights():
  """The step maps the loss over replicas: the kernels gain a dim."""
  model = train_tiny.random_model(train_tiny.MHA)
  optimizer = OptimizerConfig(kind="sgd", momentum=0.9, clip_norm=None)
  run = lambda mesh, **settings: train_tiny.train(
    model, optimizer, mesh, num_steps=1, **settings
  )[0][0]
  mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
  ours = run(mesh, accumulation=2, loss="tpu")
  theirs = run(train_tiny.one_device())
  assert max(train_tiny.distances(ours, theirs).values()) < 1e-5
