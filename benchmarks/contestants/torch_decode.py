"""transformers' `generate` on torch, with its cache of growing length."""

import torch
import transformers

from benchmarks import turns
from benchmarks.contestants import decoding


def main():
  config, options = decoding.parse()
  torch.manual_seed(0)
  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=config.vocab_size,
      num_hidden_layers=config.num_layers,
      hidden_size=config.embed_dim,
      num_attention_heads=config.num_heads,
      num_key_value_heads=config.num_kv_heads,
      intermediate_size=config.mlp_dim,
      max_position_embeddings=config.max_positions,
      tie_word_embeddings=config.tied,
    )
  ).eval()
  if options.dtype == "bf16":
    model = model.to(torch.bfloat16)
  # Nothing stops an answer before its length.
  model.generation_config.eos_token_id = None
  model.generation_config.bos_token_id = None
  model.generation_config.pad_token_id = 0
  shape = options.batch, decoding.PROMPT
  prompts = torch.randint(1, config.vocab_size, shape)

  @torch.inference_mode()
  def run(count):
    out = model.generate(
      prompts,
      attention_mask=torch.ones_like(prompts),
      max_new_tokens=count,
      min_new_tokens=count,
      do_sample=False,
    )
    assert out.shape[1] == decoding.PROMPT + count

  turns.serve(
    decoding.stopwatch(run),
    torch=torch.__version__,
    transformers=transformers.__version__,
  )


if __name__ == "__main__":
  main()
