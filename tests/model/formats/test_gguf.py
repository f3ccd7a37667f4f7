import dataclasses

import gguf as library
import jax
import numpy as np
import pytest

from model.config import Rope
from model.formats import gguf
from model.rope import frequencies
from tests.model.families.test_parity import config_of
from tests.model.formats import gguf_files
from tests.model.formats.test_huggingface import model_of
from tests.oracles.named_checkpoint import NamedCheckpoint

Type = library.GGMLQuantizationType

# Cases that the format can express, with what it cannot say put right.
CASES = {
  "llama2": {},
  "llama_bias": {},
  "smollm2": {},
  "qwen2": {},
  "gemma2": {"attention_scale": 10**-0.5},
  "gemma3": {"attention_scale": 10**-0.5},
}
LLAMA31 = Rope(
  theta=500_000.0,
  scaling="llama3",
  factor=8.0,
  original_max_positions=8192,
)

# Largest error of a value over the largest magnitude in its block: half a
# step of the grid (a whole one where the grid is not symmetric).
ERRORS = {
  "F32": 0,
  "F16": 2**-11,
  "BF16": 2**-8,
  "Q4_0": 1 / 8,
  "Q4_1": 1 / 15,
  "Q5_0": 1 / 16,
  "Q5_1": 1 / 31,
  "Q8_0": 1 / 254,
  "TQ1_0": 1 / 2,
  "TQ2_0": 1 / 2,
  "MXFP4": 1 / 3,
}


def opened(path):
  return gguf.open_file(path)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_hugging_face_form(tmp_path, case):
  extra = {"rope__freq_base_swa": 100.0} if case == "gemma3" else {}
  gguf_files.write(tmp_path / "m.gguf", case, **extra)
  model = gguf.load(opened(tmp_path / "m.gguf"))
  expected = dataclasses.replace(config_of(case), **CASES[case])
  assert model.config == expected
  # Gemma's norm weights have been through "+ 1", which rounds.
  atol = 2e-7 if case.startswith("gemma") else 0
  for ours, theirs in zip(
    jax.tree.leaves(model), jax.tree.leaves(model_of(case)), strict=True
  ):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def blocks(x, type_):
  size, _ = library.GGML_QUANT_SIZES[type_]
  return x.reshape(-1, size)


class Wide(NamedCheckpoint):
  """A Llama of one layer whose every row is whole blocks of 256."""

  def __init__(self):
    D = F = 256
    layer = {
      "attn_q": (D, D), "attn_k": (D // 2, D), "attn_v": (D // 2, D),
      "attn_output": (D, D), "ffn_gate": (F, D), "ffn_up": (F, D),
      "ffn_down": (D, F), "attn_norm": (D,), "ffn_norm": (D,),
    }  # fmt: skip
    self._shapes = {"token_embd.weight": (5, D), "output_norm.weight": (D,)}
    self._shapes |= {f"blk.0.{k}.weight": v for k, v in layer.items()}
    self._centre = 1.0

  def write(self, path, type_, data_of):
    """data_of: name -> the raw blocks of a matrix."""
    writer = library.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(9)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    for name, shape in self._shapes.items():
      if len(shape) == 1:
        writer.add_tensor(name, self.read(name))
      else:
        writer.add_tensor(name, data_of(name), raw_dtype=type_)
    gguf_files.finish(writer)


def matrices(model):
  """Those whose rows are stored in order, as [outputs, inputs]."""
  layer = model.layers
  return {
    "token_embd.weight": np.asarray(model.embed.table[...]),
    "blk.0.ffn_down.weight": np.asarray(layer.mlp.down.w[0]).T,
    "blk.0.ffn_gate.weight": np.asarray(layer.mlp.gate.w[0]).T,
    "blk.0.attn_v.weight": np.asarray(layer.attention.v.w[0])
      .reshape(256, -1).T,
    "blk.0.attn_output.weight": np.asarray(layer.attention.out.w[0])
      .reshape(-1, 256).T,
  }  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_quantised_values_are_near(tmp_path, name):
  type_, source = Type[name], Wide()
  source.write(
    tmp_path / "m.gguf",
    type_,
    lambda tensor: library.quants.quantize(source.read(tensor), type_),
  )
  for tensor, ours in matrices(gguf.load(opened(tmp_path / "m.gguf"))).items():
    theirs = blocks(source.read(tensor), type_)
    error = np.abs(blocks(ours, type_) - theirs).max(axis=1)
    largest = np.abs(theirs).max(axis=1)
    # Scales and minima of blocks are themselves rounded to float16, whose
    # smallest step is 2^-24.
    scales = 2**-9 if library.GGML_QUANT_SIZES[type_][0] > 1 else 0
    smallest = 2**-25 if name == "F16" else 0
    assert (error <= (ERRORS[name] + scales) * largest + smallest).all()
    if ERRORS[name]:
      assert error.max() > 0


def decodable():
  """Names of the quantised types that the gguf package can read."""
  for type_ in Type:
    size, width = library.GGML_QUANT_SIZES[type_]
    try:
      library.quants.dequantize(np.zeros((1, 256 // size * width), "u1"), type_)
    except NotImplementedError:
      continue
    yield type_.name


@pytest.mark.parametrize("name", sorted(set(decodable()) - set(ERRORS)))
def test_every_type_reads(tmp_path, name):
  # No quantiser to compare with: any bytes are some blocks.
  type_, source, written = Type[name], Wide(), {}
  size, width = library.GGML_QUANT_SIZES[type_]

  def data(tensor):
    rows, columns = source.shape(tensor)
    rng = np.random.default_rng(len(tensor))
    written[tensor] = rng.integers(
      0, 256, (rows, columns // size * width), np.uint8
    )
    return written[tensor]

  source.write(tmp_path / "m.gguf", type_, data)
  with np.errstate(all="ignore"):
    for tensor, ours in matrices(
      gguf.load(opened(tmp_path / "m.gguf"))
    ).items():
      row = library.quants.dequantize(written[tensor][-1:], type_)
      np.testing.assert_array_equal(ours[-1], row[0])


def test_types_cover_the_common_files():
  common = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_XXS"}
  assert common < set(decodable())


def test_llama31_scaling_is_recognised(tmp_path):
  head_dim = config_of("llama2").head_dim
  plain, _ = frequencies(Rope(theta=500_000.0), head_dim)
  scaled, _ = frequencies(LLAMA31, head_dim)

  def config(divisors, name):
    path = tmp_path / name
    gguf_files.write(
      path,
      "llama2",
      rope__freq_base=500_000.0,
      extra_tensors=[("rope_freqs.weight", divisors.astype(np.float32))],
    )
    return gguf.load(opened(path)).config

  assert config(plain / scaled, "a.gguf").rope == LLAMA31
  with pytest.raises(ValueError, match="not the scaling of Llama 3.1"):
    config(np.linspace(1, 8, len(plain)), "b.gguf")


def test_the_27b_gemmas_have_their_own_query_scale():
  from model.families import gemma2, gemma3
  from model.families.fields import Fields

  for family, preset in (
    (gemma2, gemma2.gemma2_27b()),
    (gemma2, gemma2.gemma2_9b()),
    (gemma3, gemma3.gemma3_27b()),
    (gemma3, gemma3.gemma3_12b()),
  ):
    fields = Fields(
      {
        "attention.sliding_window": preset.window,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
      },
      source="test",
    )
    said = family.FAMILY.read_gguf(fields, dataclasses.asdict(preset))
    assert said["attention_scale"] == preset.attention_scale


@pytest.mark.parametrize(
  ("field", "match"),
  [
    ({"expert_count": 8}, "expert_count=8 is not supported"),
    ({"attention__causal": 0}, "attention.causal=0 is not supported"),
    ({"rope__dimension_count": 4}, "rope.dimension_count=4"),
    ({"logit_scale": 0.5}, "does not know: logit_scale=0.5"),
    ({"attention__value_length": 4}, "attention.value_length=4"),
  ],
)
def test_what_is_not_understood_is_refused(tmp_path, field, match):
  gguf_files.write(tmp_path / "m.gguf", "llama2", **field)
  with pytest.raises(ValueError, match=match):
    gguf.load_config(opened(tmp_path / "m.gguf"))


def test_unknown_architecture_is_named(tmp_path):
  writer = library.GGUFWriter(tmp_path / "m.gguf", "mamba")
  gguf_files.finish(writer)
  with pytest.raises(ValueError, match="architecture 'mamba' is not"):
    gguf.load_config(opened(tmp_path / "m.gguf"))


@pytest.mark.parametrize("keep", [0, 20, 500, 20_000])
def test_cut_file_is_named(tmp_path, keep):
  path = tmp_path / "m.gguf"
  gguf_files.write(path, "llama2")
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(ValueError, match="m.gguf is damaged or no GGUF file"):
    opened(path)


def test_absent_file_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="no GGUF file"):
    opened(tmp_path / "m.gguf")
