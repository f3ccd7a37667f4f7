"""The wheel, installed and run in a folder that is not ours.

The packages have plain names (`data`, `model`, ...) that a user's folder may
have too. Under `python -m` the current folder comes first on the path, so a
package there would hide ours.
"""

import ast
import importlib.metadata
import os
import pathlib
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_BESIDE = ("benchmarks", "examples", "tests")
_ROOMS = sorted(
  path.parent.name
  for path in _ROOT.glob("*/__init__.py")
  if path.parent.name not in _BESIDE
)
# What is imported under another name than it is installed.
_DISTRIBUTIONS = {"absl": "absl-py", "orbax": "orbax-checkpoint"}


def _run(*command, **settings):
  got = subprocess.run(
    [*map(str, command)], capture_output=True, text=True, **settings
  )
  assert got.returncode == 0, got.stdout + got.stderr
  return got.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """Built from a copy: setuptools writes into the tree that it builds."""
  copy = tmp_path_factory.mktemp("source")
  for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(_ROOT / name, copy)
  for room in (*_ROOMS, "tests"):
    shutil.copytree(_ROOT / room, copy / room)
  build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
  # Every warning of setuptools counts, but for those about itself.
  _run(sys.executable, "-c", build, cwd=copy)
  (path,) = (copy / "dist").glob("*.whl")
  return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
  """A fresh environment with the wheel; the libraries are those of ours."""
  home = tmp_path_factory.mktemp("venv")
  venv.create(home, with_pip=False, symlinks=True)
  interpreter = home / "bin" / "python"
  packages = pathlib.Path(
    _run(
      interpreter,
      "-c",
      "import sysconfig; print(sysconfig.get_path('purelib'))",
    ).strip()
  )
  with zipfile.ZipFile(wheel) as archive:
    archive.extractall(packages)
  # A line of a .pth file adds a folder at the end, and none of its .pth files:
  # an editable install of this checkout stays out of sight.
  ours = [sysconfig.get_path("purelib"), *site.getsitepackages()]
  (packages / "libraries.pth").write_text("\n".join(dict.fromkeys(ours)))
  return interpreter


def _main(python, folder, module, *flags, options=()):
  """Runs a main of the wheel in `folder`, as a user would."""
  environment = {
    name: value for name, value in os.environ.items() if "PYTHON" not in name
  }
  return subprocess.run(
    [python, *options, "-m", module, *flags],
    cwd=folder,
    env=environment,
    capture_output=True,
    text=True,
  )


def test_the_wheel_holds_the_rooms_and_nothing_else(wheel):
  names = zipfile.ZipFile(wheel).namelist()
  sources = {
    str(path.relative_to(_ROOT))
    for room in _ROOMS
    for path in (_ROOT / room).rglob("*.*")
    if path.is_file() and path.suffix != ".pyc"
  }
  assert {name for name in names if ".dist-info/" not in name} == sources
  assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("is_package", [False, True])
def test_a_main_runs_beside_data_of_the_user(python, tmp_path, is_package):
  """Their `data/` holds the corpus; ours, of the same name, holds the code."""
  corpus = tmp_path / "data"
  corpus.mkdir()
  stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
  for path in (stdlib / "email").glob("*.py"):
    shutil.copy(path, corpus / f"{path.stem}.txt")
  if is_package:
    (corpus / "__init__.py").write_text("")
  (tmp_path / "prepare.py").write_text(
    "from data.config import PrepareConfig, Source\n"
    "def get_config():\n"
    "  source = Source(path='data/*.txt', format='text')\n"
    "  return PrepareConfig(sources=(source,), vocab_size=500)\n"
  )
  got = _main(
    python, tmp_path, "data.prepare", "--config=prepare.py", "--workdir=out",
    "--config.heldout_fraction=0.2",
    options=["-P"] if is_package else [],
  )  # fmt: skip
  assert got.returncode == 0, got.stderr
  assert (tmp_path / "out" / "tokenizer.model").is_file()


def test_a_package_that_hides_ours_is_named(python, tmp_path):
  (tmp_path / "data").mkdir()
  (tmp_path / "data" / "__init__.py").write_text("")
  got = _main(python, tmp_path, "train.pretrain", "--help")
  assert got.returncode == 1
  last = got.stderr.strip().splitlines()[-1]
  assert f"{tmp_path / 'data'} hides the package 'data' of OneMesh" in last
  assert "python -P -m" in last
  got = _main(python, tmp_path, "train.pretrain", "--help", options=["-P"])
  assert got.returncode == 0 and "--config.data.seed=" in got.stdout


def test_what_is_imported_is_required():
  """setup.py declares each library that a room imports, or a user's extra."""
  required = importlib.metadata.requires("onemesh")
  assert required, "install the project: pip install -e '.[test]'"
  names = {
    re.split(r"[^\w.-]", line)[0].lower().replace("_", "-")
    for line in required
    if not re.search("extra == .(test|oracle)", line)
  }
  missing = set()
  for room in _ROOMS:
    for path in (_ROOT / room).rglob("*.py"):
      for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
          modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
          modules = [node.module]
        for top in {module.partition(".")[0] for module in modules}:
          name = _DISTRIBUTIONS.get(top, top).lower().replace("_", "-")
          if top not in {*_ROOMS, *sys.stdlib_module_names}:
            if name not in names:
              missing.add(f"{path.relative_to(_ROOT)}:{node.lineno}: {top}")
  assert not missing, "\n".join(sorted(missing))
