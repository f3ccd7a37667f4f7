"""transformers' Llama on torch, eager or compiled, with the fused AdamW."""

import contextlib

import torch
import transformers

from benchmarks import turns
from benchmarks.contestants import case


def main():
  config, batch_size, length, options = case.parse(mode=("eager", "compiled"))
  torch.manual_seed(0)
  torch.set_num_threads(2)
  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=config.vocab_size,
      num_hidden_layers=config.num_layers,
      hidden_size=config.embed_dim,
      num_attention_heads=config.num_heads,
      num_key_value_heads=config.num_kv_heads,
      intermediate_size=config.mlp_dim,
      max_position_embeddings=length,
      tie_word_embeddings=False,
      use_cache=False,
      attn_implementation="sdpa",
    )
  ).train()
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=3e-4,
    betas=(0.9, 0.95),
    weight_decay=0.1,
    fused=True,
  )
  forward = torch.compile(model) if options.mode == "compiled" else model
  tokens = torch.randint(0, config.vocab_size, (batch_size, length))

  def precision():
    if options.dtype == "float32":
      return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)

  def step():
    with precision():
      loss = forward(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()

  turns.serve(
    step, torch=torch.__version__, transformers=transformers.__version__
  )


if __name__ == "__main__":
  main()
