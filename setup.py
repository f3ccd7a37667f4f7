"""What OneMesh needs. Ranges, not pins: what is there and new enough stays."""

import pathlib

import setuptools

_README = pathlib.Path(__file__).with_name("README.md")
_ROOMS = (
  "align",
  "compress",
  "configs",
  "data",
  "evals",
  "model",
  "pallas_kernels",
  "plan",
  "serve",
  "sharding",
  "train",
)

# The TPU compiler; it needs no TPU.
_PLAN = ["libtpu; sys_platform == 'linux' and platform_machine == 'x86_64'"]

# chrF, by which the demo scores answers.
_DEMO = ["sacrebleu"]

_TEST = [
  *_DEMO,
  *_PLAN,
  "datasketch",
  "hypothesis",
  "pyrefly",
  "pytest>=8,<9.2",  # 9.2 and xdist 3.8 scatter the tests of a group
  "pytest-xdist",
  "ruff",
  "setuptools>=77",
]

setuptools.setup(
  name="onemesh",
  version="0.1.0",
  description="A language model's whole life on one device mesh, in JAX",
  long_description=_README.read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  license_files=["LICENSE"],
  python_requires=">=3.11,<3.14",
  packages=setuptools.find_packages(
    include=[*_ROOMS, *(f"{room}.*" for room in _ROOMS)]
  ),
  package_data={"": ["*.jinja", "*.json"]},
  # One folder for all packages: an editable install is then a plain path, which
  # type checkers understand and where new rooms show up by themselves.
  package_dir={"": "."},
  install_requires=[
    "absl-py",
    "flax>=0.12",
    "gguf",
    "grain>=0.2.15",
    "jax>=0.10",
    "jinja2",
    "matplotlib",
    "ml_dtypes",
    "numpy>=2",
    "optax>=0.2.6",
    "orbax-checkpoint>=0.11.30",
    "safetensors",
    "sentencepiece",
    "tensorboardX",
    "tokenizers",
    "tqdm",
  ],
  extras_require={
    "tpu": ["jax[tpu]"],
    "gpu": ["jax[cuda12]"],
    "plan": _PLAN,
    "demo": _DEMO,
    "test": _TEST,
    "oracle": [
      *_TEST,
      "accelerate",  # transformers reads GGUF files with it
      "torch==2.13.0",
      "transformers==5.24.0",
      "trl==1.16.0",
    ],
  },
)
