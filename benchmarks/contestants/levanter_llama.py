"""Levanter's trainer; runs in a venv of its own that has marin-levanter."""

import dataclasses
import importlib.metadata
import os
import tempfile

os.environ["WANDB_MODE"] = "disabled"

import haliax
import jax
import jmp
from levanter.checkpoint import CheckpointerConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

from benchmarks import turns
from benchmarks.contestants import case


def main():
  config, batch_size, length, options = case.parse()
  model = LlamaConfig(
    max_seq_len=length,
    hidden_dim=config.embed_dim,
    intermediate_dim=config.mlp_dim,
    num_layers=config.num_layers,
    num_heads=config.num_heads,
    num_kv_heads=config.num_kv_heads,
    gradient_checkpointing=True,  # Its default.
  )
  policy = "f32" if options.dtype == "float32" else "p=f32,c=bf16"
  settings = dict(
    id="bench",
    train_batch_size=batch_size,
    num_train_steps=100,
    tracker=NoopConfig(),
    mp=jmp.get_policy(policy),
    checkpointer=CheckpointerConfig(base_path=tempfile.mkdtemp()),
    log_jaxprs=False,
    log_xla_hlo=False,
    require_accelerator=False,
  )
  known = {field.name for field in dataclasses.fields(TrainerConfig)}
  trainer = Trainer(
    TrainerConfig(**{k: v for k, v in settings.items() if k in known}),
    AdamConfig(
      learning_rate=3e-4,
      weight_decay=0.1,
      beta1=0.9,
      beta2=0.95,
      max_grad_norm=None,
      warmup=0,
    ).build(100),
    lambda model, example, *, key=None: model.compute_next_token_loss(
      example, key=key
    ),
  )
  with trainer:
    vocab = haliax.Axis("vocab", config.vocab_size)
    state = trainer.initial_state(
      jax.random.PRNGKey(0),
      model_init=lambda: model.build(vocab, key=jax.random.PRNGKey(1)),
    )
    rows = haliax.Axis("batch", batch_size)
    positions = model.max_Pos.resize(length)

    def example():
      tokens = haliax.random.randint(
        jax.random.PRNGKey(2), (rows, positions), 0, config.vocab_size
      )
      return haliax.vmap(LmExample.causal, rows)(tokens)

    batch = haliax.named_jit(example)()

    def step():
      nonlocal state
      info = trainer.train_step(state, batch)
      state = info.state
      jax.block_until_ready(jax.tree.leaves(state.model))

    version = importlib.metadata.version("marin-levanter")
    turns.serve(step, levanter=version, jax=jax.__version__)
  os._exit(0)  # Its background threads would wait.


if __name__ == "__main__":
  main()
