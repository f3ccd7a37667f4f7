"""The shortest honest training step of a Llama in plain JAX, as a yardstick.

No mesh, no policy, no options: one function of a dict of arrays. It has the
tricks that our step has on a CPU: a custom_vjp matmul with bf16 operands and
cotangents, float32 activations, and an unrolled scan over stacked layers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import turns
from benchmarks.contestants import case


def make_matmul(dtype):
  """x [..., I] @ w [I, O] with operands in `dtype`, both ways."""
  if dtype == "float32":
    return lambda x, w: x @ w
  low = lambda x: x.astype(jnp.bfloat16)
  dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)

  @jax.custom_vjp
  def matmul(x, w):
    return dot(low(x), low(w))

  def forward(x, w):
    return dot(low(x), low(w)), (low(x), w)

  def backward(saved, g):
    x, w = saved
    g = low(g)
    rows = lambda a: a.reshape(-1, a.shape[-1])
    return dot(g, low(w).T), dot(rows(x).T, rows(g))

  matmul.defvjp(forward, backward)
  return matmul


def init(key, c):
  """Weights of the model that `c`, a `ModelConfig`, describes."""
  D, F, L = c.embed_dim, c.mlp_dim, c.num_layers
  q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  keys = iter(jax.random.split(key, 9))
  w = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
  return dict(
    embed=w(c.vocab_size, D), head=w(D, c.vocab_size), norm=jnp.ones(D),
    layers=dict(
      q=w(L, D, q), k=w(L, D, kv), v=w(L, D, kv), o=w(L, q, D),
      gate=w(L, D, F), up=w(L, D, F), down=w(L, F, D),
      norm1=jnp.ones((L, D)), norm2=jnp.ones((L, D)),
    ),
  )  # fmt: skip


def make_step(c, T, dtype, learning_rate=3e-4):
  """A jitted, donated (params, m, v, t, tokens) -> (the same, loss) step."""
  mm = make_matmul(dtype)
  N, K, H = c.num_heads, c.num_kv_heads, c.head_dim
  freq = c.rope.theta ** -(jnp.arange(0, H, 2) / H)
  angle = jnp.arange(T)[:, None] * freq
  cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
  causal = jnp.tril(jnp.ones((T, T), bool))

  def norm(x, w):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + c.norm_eps) * w

  def rotate(x):
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  def layer(x, w):
    B = x.shape[0]
    h = norm(x, w["norm1"])
    q = rotate(mm(h, w["q"]).reshape(B, T, N, H)).reshape(B, T, K, N // K, H)
    k = rotate(mm(h, w["k"]).reshape(B, T, K, H))
    v = mm(h, w["v"]).reshape(B, T, K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * H**-0.5
    probs = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    x = x + mm(
      jnp.einsum("bkgts,bskh->btkgh", probs, v).reshape(B, T, N * H), w["o"]
    )
    h = norm(x, w["norm2"])
    gated = jax.nn.silu(mm(h, w["gate"])) * mm(h, w["up"])
    return x + mm(gated, w["down"]), None

  def loss_fn(params, tokens):
    x, _ = lax.scan(
      layer, params["embed"][tokens], params["layers"], unroll=c.num_layers
    )
    logits = mm(norm(x, params["norm"]), params["head"])[:, :-1]
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

  @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
  def step(params, m, v, t, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, v, grads)

    def update(p, m, v):
      m, v = m / (1 - 0.9**t), v / (1 - 0.95**t)
      decay = 0.1 if p.ndim > 1 else 0.0
      return p - learning_rate * (m / (jnp.sqrt(v) + 1e-8) + decay * p)

    return jax.tree.map(update, params, m, v), m, v, loss

  return step


def main():
  config, batch_size, length, options = case.parse()
  params = init(jax.random.key(0), config)
  shape = batch_size, length
  tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)
  zeros = lambda: jax.tree.map(jnp.zeros_like, params)
  state = params, zeros(), zeros()
  train_step = make_step(config, length, options.dtype)

  def step():
    nonlocal state
    *state, loss = train_step(*state, jnp.float32(1), tokens)
    loss.block_until_ready()

  turns.serve(step, jax=jax.__version__)


if __name__ == "__main__":
  main()
