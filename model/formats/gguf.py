"""Import of GGUF files, llama.cpp's format, quantised or not.

Weights come out in float32: what a quantised file means, not how it was
quantised. The format says less than config.json: Mistral's window is lost
(llama.cpp runs it as a Llama), and Gemma's constants are llama.cpp's own.
"""

import math
import pathlib
from collections.abc import Set

import gguf
import numpy as np
from jax.sharding import Mesh

from model import rope as rotary
from model.config import ModelConfig, Rope
from model.families import registry
from model.families.family import GGUF, Family
from model.families.fields import Fields
from model.formats import weights_map
from model.transformer import Transformer
from sharding.axes import Rules

# Frequencies of Llama 3.1 as a tensor instead of the numbers behind them.
_ROPE_FREQS = "rope_freqs.weight"


def open_file(path) -> gguf.GGUFReader:
  """Opens a file, memory mapped.

  Raises:
    FileNotFoundError: it is not there.
    ValueError: it is not a whole GGUF file.
  """
  if not pathlib.Path(path).is_file():
    raise FileNotFoundError(f"there is no GGUF file {path}")
  try:
    return gguf.GGUFReader(path)
  except (ValueError, IndexError, KeyError) as error:
    raise ValueError(f"{path} is damaged or no GGUF file: {error}") from error


def load_config(reader: gguf.GGUFReader) -> tuple[Family, ModelConfig]:
  """What model a file holds.

  Raises:
    ValueError: the architecture is unknown, or a field asks for what the
      decoder does not compute.
  """
  architecture = _value(reader, "general.architecture")
  families = {
    f.gguf_architecture: f
    for f in registry.FAMILIES.values()
    if f.gguf_architecture is not None
  }
  # Llama and Mistral share one name; a file cannot tell them apart.
  families["llama"] = registry.find("llama")
  if architecture not in families:
    raise ValueError(
      f"GGUF architecture {architecture!r} is not supported; supported:"
      f" {sorted(families)}"
    )
  family = families[architecture]
  prefix = f"{architecture}."
  values = {
    name.removeprefix(prefix): field.contents()
    for name, field in reader.fields.items()
    if name.startswith(prefix)
  }
  fields = Fields(values, source=f"GGUF metadata of {architecture!r}")
  tensors = {t.name: t for t in reader.tensors}
  shared = _read_decoder(fields, tensors)
  arguments = shared | family.read_gguf(fields, shared)
  fields.finish()
  return family, ModelConfig(**arguments)


def load(
  reader: gguf.GGUFReader, *, mesh: Mesh | None = None, rules: Rules = Rules()
) -> Transformer:
  """The model of a file, dequantised to float32.

  Args:
    reader: from `open_file`.
    mesh: where to place the weights, shard by shard; None: one device.
    rules: how logical dims map to the axes of `mesh`.

  Raises:
    ValueError: see `load_config` and `weights_map.load`.
  """
  family, config = load_config(reader)
  source = _Tensors(reader, config, permuted=family.gguf_permutes)
  return weights_map.load(
    config,
    GGUF,
    source,
    ignored={_ROPE_FREQS},
    mesh=mesh,
    rules=rules,
  )


class _Tensors:
  """Tensors as Hugging Face would store them, dequantised when read."""

  def __init__(self, reader, config: ModelConfig, *, permuted: bool):
    self._tensors = {t.name: t for t in reader.tensors}
    self._config = config
    self._permuted = permuted

  def names(self) -> Set[str]:
    return self._tensors.keys()

  def shape(self, name: str) -> tuple[int, ...]:
    # GGUF lists the dim that is contiguous in memory first.
    return tuple(int(n) for n in reversed(self._tensors[name].shape))

  def read(self, name: str) -> np.ndarray:
    tensor = self._tensors[name]
    try:
      value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
      raise ValueError(
        f"tensor {name}: the gguf package cannot read the type"
        f" {tensor.tensor_type.name}"
      ) from error
    value = value.reshape(self.shape(name)).astype(np.float32, copy=False)
    role = name.split(".")[-2]
    if self._permuted and role in ("attn_q", "attn_k"):
      heads = self._config.num_heads
      if role == "attn_k":
        heads = self._config.num_kv_heads
      value = _halves(value, heads)
    if self._config.norm_offset and role.endswith("norm"):
      # llama.cpp stores what multiplies, Gemma what is added to one.
      value = value - np.float32(1)
    return value


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows of each head from (pair, side) to (side, pair).

  llama.cpp rotates neighbours (2i, 2i + 1), we and Hugging Face
  (i, i + H / 2).
  """
  split = rows.reshape(heads, -1, 2, *rows.shape[1:])
  return split.swapaxes(1, 2).reshape(rows.shape)


def _value(reader: gguf.GGUFReader, name: str):
  field = reader.get_field(name)
  if field is None:
    raise ValueError(f"the GGUF file has no field {name!r}")
  return field.contents()


def _read_decoder(fields: Fields, tensors: dict) -> dict:
  """ModelConfig arguments that all architectures spell alike."""
  embed_dim = fields.take("embedding_length")
  num_heads = fields.take("attention.head_count")
  num_kv_heads = fields.take("attention.head_count_kv", num_heads)
  head_dim = fields.take("attention.key_length", embed_dim // num_heads)
  fields.expect("attention.value_length", head_dim)
  fields.expect("rope.dimension_count", head_dim)
  fields.expect("attention.causal", True)
  fields.expect("expert_count", 0)
  fields.expect("expert_used_count", 0)
  max_positions = fields.take("context_length")
  if "token_embd.weight" not in tensors:
    raise ValueError("the GGUF file has no tensor token_embd.weight")
  vocab_size = int(tensors["token_embd.weight"].shape[1])
  fields.expect("vocab_size", vocab_size)
  return {
    "vocab_size": vocab_size,
    "num_layers": fields.take("block_count"),
    "embed_dim": embed_dim,
    "num_heads": num_heads,
    "num_kv_heads": num_kv_heads,
    "head_dim": head_dim,
    "mlp_dim": fields.take("feed_forward_length"),
    "max_positions": max_positions,
    "norm_eps": _shortest(fields.take("attention.layer_norm_rms_epsilon")),
    "rope": _read_rope(fields, tensors, max_positions, head_dim),
    "qkv_bias": "blk.0.attn_q.bias" in tensors,
    "out_bias": "blk.0.attn_output.bias" in tensors,
    "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    "tied": "output.weight" not in tensors,
  }


def _read_rope(fields, tensors, max_positions: int, head_dim: int) -> Rope:
  theta = _shortest(fields.take("rope.freq_base"))
  kind = fields.take("rope.scaling.type", "none")
  factor = _shortest(fields.take("rope.scaling.factor", 1.0))
  original = fields.take("rope.scaling.original_context_length", None)
  fields.expect("rope.scaling.attn_factor", 1.0)
  fields.expect("rope.scaling.finetuned", True, False)
  if _ROPE_FREQS in tensors:
    if kind != "none":
      raise ValueError(
        f"{fields.source}: both {_ROPE_FREQS} and rope.scaling.type={kind!r}"
      )
    return _llama3_rope(theta, tensors[_ROPE_FREQS].data, head_dim)
  if kind == "none":
    return Rope(theta=theta)
  if kind == "linear":
    return Rope(theta=theta, scaling="linear", factor=factor)
  if kind == "yarn":
    return Rope(
      theta=theta,
      scaling="yarn",
      factor=factor,
      original_max_positions=original or max_positions,
      beta_fast=fields.take("rope.scaling.yarn_beta_fast", 32.0),
      beta_slow=fields.take("rope.scaling.yarn_beta_slow", 1.0),
    )
  raise ValueError(
    f"{fields.source}: rope.scaling.type={kind!r} is not supported; supported:"
    " 'none', 'linear', 'yarn'"
  )


def _llama3_rope(theta: float, divisors: np.ndarray, head_dim: int) -> Rope:
  """The Llama 3.1 scaling whose divisors of the frequencies a file holds.

  Raises:
    ValueError: they are of no published Llama.
  """
  rope = Rope(
    theta=theta,
    scaling="llama3",
    factor=round(float(divisors.max()), 3),
    original_max_positions=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
  )
  plain, _ = rotary.frequencies(Rope(theta=theta), head_dim)
  scaled, _ = rotary.frequencies(rope, head_dim)
  same_size = divisors.shape == plain.shape
  if not same_size or not np.allclose(plain / divisors, scaled, rtol=1e-5):
    raise ValueError(
      f"{_ROPE_FREQS} is not the scaling of Llama 3.1 and 3.2 (low 1, high 4,"
      f" original 8192 positions); got {divisors}"
    )
  return rope


def _shortest(value: float) -> float:
  """The decimal that a float32 stands for: 1e-5, not 9.999999747378752e-06."""
  return value if math.isinf(value) else float(str(np.float32(value)))
