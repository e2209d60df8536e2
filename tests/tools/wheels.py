"""The wheels in dist/, each installed where nothing else is: `make wheel` runs this afterwards.

Not part of `make test`, which this file's name keeps it out of: it needs what `make wheel` builds.
"""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
WHEELS = sorted(ROOT.glob("dist/*.whl"))

# Nothing of the checkout, of its environment variables, or of what is installed beside torch.
PROGRAM = """
import importlib.util, pathlib, sys
import torch, fastattn
from fastattn.backends import operators
from fastattn.kernels.host import config

assert pathlib.Path(fastattn.__file__).is_relative_to(sys.prefix), fastattn.__file__
assert operators.EXTENSION_ERROR is None, operators.EXTENSION_ERROR
assert (pathlib.Path(fastattn.__file__).parent / "py.typed").exists()
model = torch.nn.TransformerEncoderLayer(64, 4, dropout=0.0)
assert fastattn.replace_attention(model) == 1
model(torch.randn(5, 2, 64)).sum().backward()
assert len(operators.torch.ops.fastattn.cpu_isas()) > 0
"""


def test_there_is_a_wheel():
    assert WHEELS, "make wheel builds them"


@pytest.fixture(scope="module", params=WHEELS, ids=lambda path: path.name)
def wheel(request):
    return request.param


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Runs Python in an environment that has the wheel and torch."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = str(folder / "bin/python")
    [site] = folder.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    # On PYTHONPATH, where make puts it, the checkout counts as installed.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, str(wheel)], env=own, check=True, capture_output=True, text=True)
    (site / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")

    def call(*arguments):
        empty = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [python, *arguments], cwd=folder, env=empty, capture_output=True, text=True, timeout=300
        )

    return call


def test_the_tag_is_one_that_indexes_take(wheel):
    name, _, *tags = wheel.stem.split("-")
    assert name == "fastattn"
    assert tags[:2] == ["cp310", "abi3"]
    assert "manylinux" in tags[2]
    assert "linux_x86_64" not in tags[2].split(".")


def test_no_library_of_others_is_inside(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {Path(name).name for name in names if ".so" in name}
    expected = {"_C.abi3.so", *({"_cuda.so"} if "+cu" in wheel.name else ())}
    assert libraries == expected
    assert not [name for name in names if name.startswith("fastattn.libs")]


def test_the_package_runs_without_the_sources(run):
    done = run("-c", PROGRAM)
    assert done.returncode == 0, done.stderr


def test_the_report_finds_everything_right(run, wheel):
    done = run("-m", "fastattn", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["libraries"]["CPU kernels"]["missing"] is None
    assert 0 < found["checks"]["cpu"]["worst error"] <= 1
    if "+cu" in wheel.name:
        assert found["libraries"]["CUDA kernels"]["built by"]
