"""What a decoder is: one dataclass that every family fills in.

Imports no JAX: configs are read by command lines and planners.
"""

import dataclasses
from typing import Literal, get_args, get_origin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """Rotary position embedding (arXiv:2104.09864) and its long-context forms.

  Attributes:
    theta: base of the frequencies. Required: a default would win silently
      over the value of a checkpoint.
    scaling: "none"; "linear" (arXiv:2306.15595) divides positions by
      `factor`; "llama3" (Llama 3.1) divides low frequencies by `factor` with
      a ramp between two wavelengths; "yarn" (arXiv:2309.00071).
    factor: how many times longer than `original_max_positions`.
    original_max_positions: context length before scaling (llama3, yarn).
    low_freq_factor: llama3; wavelengths above original / low are divided.
    high_freq_factor: llama3; wavelengths below original / high are kept.
    beta_fast: yarn; rotations above which a frequency is kept.
    beta_slow: yarn; rotations below which a frequency is divided.
    attention_factor: yarn; multiplies cos and sin; None: 0.1 ln(factor) + 1.
    truncate: yarn; round the ramp's ends to whole dims.
  """

  theta: float
  scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
  factor: float = 1.0
  original_max_positions: int | None = None
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  truncate: bool = True

  def __post_init__(self):
    _check_choices("rope", self)
    needs = self.scaling in ("llama3", "yarn")
    if needs and self.original_max_positions is None:
      raise ValueError(
        f"rope.scaling={self.scaling!r} needs rope.original_max_positions,"
        " the context length before scaling; got None"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moe:
  """A mixture of experts in place of each layer's feed-forward.

  Attributes:
    num_experts: E, each a feed-forward of width `model.mlp_dim`.
    num_active: k, how many experts a token goes to.
    num_shared: experts that every token goes to besides (arXiv:2401.06066).
    scores: "softmax" or "sigmoid" (DeepSeek-V3, arXiv:2412.19437, 2.1.2) of
      the router's logits.
    normalize: the scores of the chosen experts are divided by their sum.
    scale: multiplies them after that (V3's routed scaling factor).
    capacity_factor: c; of a row of T positions an expert takes at most
      ceil(c k T / E) tokens, the first ones; of the others this expert adds
      nothing to the residual stream (arXiv:2006.16668, arXiv:2101.03961).
      None: no limit, nothing is dropped. There is none for new tokens
      behind a cache.
    balance_loss: factor of each layer's balance loss (`moe.balance_losses`).
    z_loss: factor of logsumexp(router logits) ** 2, a layer (ST-MoE,
      arXiv:2202.08906, equation 5).
    bias_rate: how far a step moves a bias that decides, with the scores, which
      experts are chosen, towards experts with few tokens (arXiv:2408.15664);
      0 keeps the bias as it is, None: there is none.
  """

  num_experts: int
  num_active: int
  num_shared: int = 0
  scores: Literal["softmax", "sigmoid"] = "softmax"
  normalize: bool = True
  scale: float = 1.0
  capacity_factor: float | None = None
  balance_loss: float = 0.0
  z_loss: float = 0.0
  bias_rate: float | None = None

  def __post_init__(self):
    _check_choices("model.moe", self)
    if not 1 <= self.num_active <= self.num_experts:
      raise ValueError(
        "model.moe.num_active must be between 1 and"
        f" model.moe.num_experts={self.num_experts}, got {self.num_active}"
      )
    if self.num_shared < 0:
      raise ValueError(
        f"model.moe.num_shared must be at least 0, got {self.num_shared}"
      )
    if self.capacity_factor is not None and self.capacity_factor <= 0:
      raise ValueError(
        "model.moe.capacity_factor must be above 0, or None for no limit; got"
        f" {self.capacity_factor}"
      )
    for name in ("balance_loss", "z_loss", "bias_rate"):
      if (getattr(self, name) or 0.0) < 0:
        raise ValueError(
          f"model.moe.{name} must be at least 0, got {getattr(self, name)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A decoder-only transformer.

  Attributes:
    vocab_size: V.
    num_layers: L.
    embed_dim: D.
    num_heads: N query heads.
    num_kv_heads: K; N for MHA, 1 for MQA, between them GQA.
    head_dim: H, free of D / N.
    mlp_dim: F; with `moe`, of each expert.
    max_positions: longest sequence the model may see.
    rope: rotary embedding of global layers; None: no positions.
    rope_local: rotary embedding of local layers; None: `rope`.
    layer_pattern: kinds of layers, repeated to L: "global" attends to all,
      "local" to the last `window` positions.
    window: positions a local layer sees, itself included.
    causal: False lets every position see every other of its segment.
    norm: "rms" (arXiv:1910.07467) or "layer" (arXiv:1607.06450).
    norm_eps: added to the variance.
    norm_offset: weights are stored minus one (Gemma).
    norm_bias: LayerNorm has a bias.
    norm_placement: "pre": x + f(norm(x)); "post": norm(x + f(x));
      "sandwich": x + norm(f(norm(x))); "parallel":
      x + attention(norm(x)) + mlp(norm'(x)).
    qk_norm: RMSNorm over head_dim on queries and keys.
    qkv_bias: bias on the query, key and value projections.
    out_bias: bias on the attention output projection.
    mlp_bias: bias on the feed-forward projections.
    moe: experts in place of the feed-forward of every layer; None: dense.
    activation: "silu", "gelu" (exact), "gelu_tanh" or "relu2"
      (arXiv:2109.08668).
    gated: SwiGLU / GeGLU (arXiv:2002.05202): act(x W_gate) * (x W_up).
    attention_scale: multiplies q k; None: head_dim ** -0.5.
    attention_softcap: scores become cap * tanh(scores / cap).
    logit_softcap: the same for logits.
    embed_scale: multiplies embeddings (Gemma: sqrt(D)).
    logit_scale: multiplies logits, before the soft-cap.
    tied: the head is the embedding table.
    embed_dropout: rate on embeddings.
    residual_dropout: rate on each branch before it joins the residual.
    attention_dropout: rate on attention probabilities.
    init_std: standard deviation of embeddings; projections use
      1 / sqrt(fan_in), output projections also 1 / sqrt(2 L)
      (GPT-2's scaling).
  """

  vocab_size: int
  num_layers: int
  embed_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  max_positions: int
  rope: Rope | None
  rope_local: Rope | None = None
  layer_pattern: tuple[Literal["global", "local"], ...] = ("global",)
  window: int | None = None
  causal: bool = True
  norm: Literal["rms", "layer"] = "rms"
  norm_eps: float = 1e-5
  norm_offset: bool = False
  norm_bias: bool = False
  norm_placement: Literal["pre", "post", "sandwich", "parallel"] = "pre"
  qk_norm: bool = False
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  moe: Moe | None = None
  activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"
  gated: bool = True
  attention_scale: float | None = None
  attention_softcap: float | None = None
  logit_softcap: float | None = None
  embed_scale: float = 1.0
  logit_scale: float = 1.0
  tied: bool = False
  embed_dropout: float = 0.0
  residual_dropout: float = 0.0
  attention_dropout: float = 0.0
  init_std: float = 0.02

  def __post_init__(self):
    _check_choices("model", self)
    for name in (
      "vocab_size",
      "num_layers",
      "embed_dim",
      "num_heads",
      "num_kv_heads",
      "head_dim",
      "mlp_dim",
      "max_positions",
    ):
      if getattr(self, name) < 1:
        raise ValueError(
          f"model.{name} must be at least 1, got {getattr(self, name)}"
        )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"model.num_heads={self.num_heads} must be a multiple of"
        f" model.num_kv_heads={self.num_kv_heads}"
      )
    if not self.layer_pattern:
      raise ValueError("model.layer_pattern must name at least one kind")
    if not {"global", "local"}.issuperset(self.layer_pattern):
      raise ValueError(
        "model.layer_pattern is made of 'global' and 'local', got"
        f" {self.layer_pattern}"
      )
    if "local" in self.layer_pattern and self.window is None:
      raise ValueError("model.layer_pattern has local layers: set model.window")
    if self.window is not None and self.window < 1:
      raise ValueError(f"model.window must be at least 1, got {self.window}")
    if self.rope is not None and self.head_dim % 2:
      raise ValueError(
        f"rotary embedding needs an even model.head_dim, got {self.head_dim}"
      )
    if self.moe is not None and self.mlp_bias:
      raise ValueError("model.mlp_bias: experts have no bias; set it to False")
    if self.norm_bias and self.norm == "rms":
      raise ValueError("model.norm_bias needs model.norm='layer'")
    for name in ("embed_dropout", "residual_dropout", "attention_dropout"):
      if not 0.0 <= getattr(self, name) < 1.0:
        raise ValueError(
          f"model.{name} must be in [0, 1), got {getattr(self, name)}"
        )

  @property
  def layer_kinds(self) -> tuple[str, ...]:
    """The kind of each of the L layers."""
    pattern = self.layer_pattern
    return tuple(pattern[i % len(pattern)] for i in range(self.num_layers))


def _check_choices(owner: str, config: Rope | Moe | ModelConfig):
  """Refuses a value that its field's Literal does not list."""
  for field in dataclasses.fields(config):
    value, choices = getattr(config, field.name), get_args(field.type)
    if get_origin(field.type) is Literal and value not in choices:
      raise ValueError(
        f"{owner}.{field.name} must be one of {choices}, got {value!r}"
      )
