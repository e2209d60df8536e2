"""What a wheel contains and what its metadata says."""

import email
import os
import runpy
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


@pytest.mark.parametrize("named", ["sm_80,sm_90a", "sm_80,compute_90"])
def test_kernels_know_what_they_are_built_for(named, tmp_path, monkeypatch):
    """Without code for sm_90a, the kernels by warpgroups are empty on their GPUs."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho compute_80\necho compute_90\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("FASTATTN_CUDA", named)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    flags = setup["code_flags"](setup["cuda_code"](str(nvcc)))
    codes = named.split(",")
    assert [flag.partition(",code=")[2] for flag in flags if "code=" in flag] == codes
    assert [flag for flag in flags if "-D" in flag] == [
        f"-DFASTATTN_HAVE_{code.upper()}" for code in codes
    ]
    assert "FASTATTN_HAVE_SM_90A" in (ROOT / "csrc/cuda/dot/wgmma_choice.cu").read_text()


def test_a_name_that_nobody_knows_stops_the_build(monkeypatch):
    """Where a library cannot be built, the build goes on without it."""
    monkeypatch.setenv("FASTATTN_CPU_ISAS", "avx2,typo")
    setup = runpy.run_path(str(ROOT / "setup.py"))

    def build():
        return setup["supported_isas"](["c++"], "x86_64-linux-gnu")

    with pytest.raises(SystemExit, match="ISAS names typo; known are baseline, avx2, avx512"):
        setup["attempt"]({}, "the extension", build, "")
