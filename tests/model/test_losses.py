"""Chunked losses against the whole matrix of logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.execution import Execution
from model.losses import cross_entropy, token_log_probs
from model.precision import POLICIES
from tests.model.jaxprs import shapes
from tests.model.tiny import CONFIG, make
from tests.tolerances import tolerance

V, D = CONFIG.vocab_size, CONFIG.embed_dim
HEADS = {
  "plain": {},
  "tied": dict(tied=True),
  "scaled and capped": dict(logit_scale=0.7, logit_softcap=3.0),
  "tied, capped": dict(tied=True, logit_softcap=2.0),
}
# (T, tokens a chunk): a remainder, no remainder, one token, one chunk a token,
# and a chunk that is larger than the row.
LENGTHS = [(11, 8), (12, 8), (1, 8), (5, 1), (7, 1000)]


def inputs(T: int, B: int = 2, scale: float = 1.0):
  rng = np.random.default_rng(T)
  hidden = scale * rng.normal(size=(B, T, D)).astype("float32")
  targets = rng.integers(0, V, (B, T), dtype=np.int32)
  weights = rng.uniform(0.2, 2.0, (B, T)).astype("float32")
  weights[:, T // 2] = 0.0
  return jnp.asarray(hidden), jnp.asarray(targets), jnp.asarray(weights)


def head_only(model):
  """The function's only inputs are hidden states and the head's weight."""
  return model.embed.table[...] if model.config.tied else model.head.w[...]


def naive_log_probs(model, hidden, targets):
  """log_softmax of all logits, spelled without the model's code."""
  config, w = model.config, head_only(model)
  logits = hidden @ (w.T if config.tied else w) * config.logit_scale
  if config.logit_softcap is not None:
    logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
  lse = jax.nn.logsumexp(logits, axis=-1)
  picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return picked - lse, lse


def naive_loss(model, hidden, targets, weights, z_loss):
  log_probs, lse = naive_log_probs(model, hidden, targets)
  return jnp.sum(weights * (z_loss * lse**2 - log_probs))


def assert_close(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, **tolerance("gradient"))


@pytest.mark.parametrize(
  ("head", "length", "z_loss"),
  [
    ("plain", LENGTHS[0], 0.0),
    ("plain", LENGTHS[2], 0.1),
    ("plain", LENGTHS[3], 0.1),
    ("tied", LENGTHS[1], 0.1),
    ("tied", LENGTHS[4], 0.0),
    ("scaled and capped", LENGTHS[0], 0.1),
    ("tied, capped", LENGTHS[1], 0.1),
  ],
)
def test_cross_entropy(head, length, z_loss):
  T, chunk = length
  model = make(**HEADS[head])
  hidden, targets, weights = inputs(T)
  execution = Execution(loss_chunk=chunk)

  def ours(model, hidden, weights):
    loss, total, aux = cross_entropy(
      model, hidden, targets, weights, z_loss=z_loss, execution=execution
    )
    # The cotangent of the sum is then not one.
    return jnp.log(loss), (loss, total, aux)

  def naive(model, hidden, weights):
    loss = naive_loss(model, hidden, targets, weights, z_loss)
    return jnp.log(loss), loss

  gradient = lambda f: jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))
  (_, (loss, total, aux)), got = gradient(ours)(model, hidden, weights)
  (_, want_loss), want = gradient(naive)(model, hidden, weights)
  np.testing.assert_allclose(loss, want_loss, **tolerance("loss"))
  np.testing.assert_allclose(total, weights.sum(), **tolerance("loss"))
  nll = naive_loss(model, hidden, targets, weights, 0.0)
  np.testing.assert_allclose(aux["nll"], nll, **tolerance("loss"))
  np.testing.assert_allclose(
    aux["z_loss"], want_loss - nll, rtol=1e-4, atol=1e-4
  )
  assert_close(got, want)
  assert loss.shape == total.shape == aux["nll"].shape == ()
  assert loss.dtype == total.dtype == aux["nll"].dtype == jnp.float32


def test_without_gradient_the_loss_is_the_same():
  model, (hidden, targets, weights) = make(), inputs(11)
  run = lambda w: cross_entropy(
    model, hidden, targets, w, z_loss=0.1, execution=Execution(loss_chunk=6)
  )[0]
  both = jax.jit(lambda w: (run(w), jax.value_and_grad(run)(w)[0]))(weights)
  np.testing.assert_allclose(*both, **tolerance("loss"))


def test_parts_have_no_gradient():
  """A loss on `aux` by mistake learns nothing, rather than the wrong thing."""
  model, (hidden, targets, weights) = make(), inputs(5)
  aux = lambda h, name: cross_entropy(model, h, targets, weights, z_loss=0.1)[
    2
  ][name]
  for name in ("nll", "z_loss"):
    np.testing.assert_array_equal(jax.grad(aux)(hidden, name), 0.0)


@pytest.mark.parametrize(
  ("head", "length"), list(zip(HEADS, LENGTHS, strict=False)), ids=str
)
def test_token_log_probs(head, length):
  T, chunk = length
  model = make(**HEADS[head])
  hidden, targets, _ = inputs(T)
  cotangent = np.random.default_rng(1).normal(size=(2, T)).astype("float32")

  def ours(model, hidden):
    log_probs = token_log_probs(
      model, hidden, targets, execution=Execution(loss_chunk=chunk)
    )
    return jnp.sum(cotangent * log_probs), log_probs

  def naive(model, hidden):
    log_probs, _ = naive_log_probs(model, hidden, targets)
    return jnp.sum(cotangent * log_probs), log_probs

  gradient = lambda f: jax.jit(jax.grad(f, (0, 1), has_aux=True))
  got, log_probs = gradient(ours)(model, hidden)
  want, want_log_probs = gradient(naive)(model, hidden)
  assert log_probs.dtype == jnp.float32
  np.testing.assert_allclose(
    log_probs, want_log_probs, **tolerance("attention")
  )
  assert_close(got, want)


@pytest.mark.parametrize("loss_chunk", [8, 10**6])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_value_holds_all_logits(policy, loss_chunk):
  model, (hidden, targets, weights) = make(), inputs(12)
  execution = Execution(loss_chunk=loss_chunk, precision=POLICIES[policy])

  def summed(model, hidden):
    loss = cross_entropy(model, hidden, targets, weights, execution=execution)
    return loss[0]

  def log_probs(model, hidden):
    return token_log_probs(model, hidden, targets, execution=execution).sum()

  for loss in (summed, log_probs):
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(model, hidden)
    weights_like = {(D, V), (V, D)}
    logits = {
      shape
      for shape in shapes(jaxpr)
      if V in shape and shape[-2:] not in weights_like
    }
    sizes = {np.prod(shape) for shape in logits}
    chunk = min(loss_chunk // 2, 6)
    assert max(sizes) == 2 * chunk * V, logits


@pytest.mark.parametrize("head", ["plain", "scaled and capped"])
def test_large_logits_stay_finite(head):
  model = make(**HEADS[head])
  hidden, targets, weights = inputs(7, scale=1000.0)
  assert jnp.abs(hidden @ head_only(model)).max() > 1000

  def loss(hidden):
    return cross_entropy(model, hidden, targets, weights, z_loss=1e-4)[0]

  value, gradient = jax.jit(jax.value_and_grad(loss))(hidden)
  want = naive_loss(model, hidden, targets, weights, 1e-4)
  np.testing.assert_allclose(value, want, **tolerance("gradient"))
  assert np.isfinite(gradient).all()
  log_probs = token_log_probs(model, hidden, targets)
  assert np.isfinite(log_probs).all() and log_probs.max() <= 0


def test_weights_of_zero_give_zero():
  """Targets of padding may be anything, and its hidden states too."""
  model, (hidden, targets, _) = make(), inputs(7)
  loss = lambda hidden: cross_entropy(
    model, hidden, targets - 100, jnp.zeros(targets.shape)
  )[0]
  value, gradient = jax.jit(jax.value_and_grad(loss))(hidden)
  assert value == 0
  np.testing.assert_array_equal(gradient, 0.0)
