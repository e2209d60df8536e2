"""What a wheel contains and what its metadata says."""

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "fastattn", "kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this tree, without the compiled libraries."""
    pytest.importorskip("setuptools", "77", reason="pyproject.toml asks for setuptools 77")
    root = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=ignore, symlinks=True)
        else:
            shutil.copy(ROOT / name, root)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    environment = os.environ | {"FASTATTN_REQUIRE_EXT": "0"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    [path] = root.glob("dist/*.whl")
    return zipfile.ZipFile(path)


def test_every_module_is_in_the_wheel_and_is_typed(wheel):
    names = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("fastattn/**/*.py")}
    modules |= {f"fastattn/{path.relative_to(ROOT)}" for path in ROOT.glob("kernels/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "fastattn/py.typed" in names  # without it type checkers take everything for Any


def test_kernels_left_out_on_purpose_are_noted(wheel):
    info = wheel.read("fastattn/_build_info.json").decode()
    assert '"left_out": true' in info
    assert wheel.filename.endswith("-py3-none-any.whl")


def test_extras(wheel):
    [metadata] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    said = email.message_from_bytes(wheel.read(metadata))
    assert {"plot", "triton"} <= set(said.get_all("Provides-Extra"))
    assert 'matplotlib; extra == "plot"' in said.get_all("Requires-Dist")
