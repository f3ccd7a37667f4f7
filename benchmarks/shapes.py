"""The models that the CPU benchmarks run, by name."""

from model.config import ModelConfig, Rope


def llama(vocab, layers, embed, heads, kv_heads, mlp, positions) -> ModelConfig:
  """An untied Llama: what every peer can build."""
  return ModelConfig(
    vocab_size=vocab,
    num_layers=layers,
    embed_dim=embed,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=embed // heads,
    mlp_dim=mlp,
    max_positions=positions,
    rope=Rope(theta=10000.0),
    norm_eps=1e-6,
  )


# name -> (model, batch, sequence length)
SHAPES = {
  "tiny": (llama(8192, 4, 256, 8, 4, 688, 256), 8, 256),
  "small": (llama(32000, 8, 512, 8, 4, 1376, 512), 4, 512),
}
