"""The CUDA library that setup.py builds: what it contains and needs, and that torch can load it.

No GPU is needed: the stub that setup.py links against replaces torch's CUDA library.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from toolkit import find_nvcc, find_tool

import fastattn
from fastattn.backends import operators

PACKAGE = Path(fastattn.__file__).parent
LIBRARY = PACKAGE / "_cuda.so"
STUB = PACKAGE.parent / "build/cuda/libtorch_cuda.so"

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")


@pytest.fixture
def library() -> Path:
    """With nvcc and the CPU extension's requirements, it must have been built."""
    if operators.EXTENSION_ERROR is not None:
        pytest.skip(operators.EXTENSION_ERROR)
    info = json.loads((PACKAGE / "_build_info.json").read_text())["cuda"]
    assert info["success"], info["reason"]
    assert re.fullmatch(r"\d+\.\d+", info["runtime"]), info  # backends/cuda.py compares this
    return LIBRARY


def output(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_machine_code_for_every_architecture(library):
    tool = find_tool("cuobjdump")
    if tool is None:
        pytest.skip("no cuobjdump, neither beside nvcc nor in a Triton wheel")
    elf, ptx = output(tool, "-lelf", library), output(tool, "-lptx", library)
    every = (PACKAGE.parent / "csrc/cuda").rglob("*.cu")
    sources = sum("__global__" in path.read_text() for path in every)
    # nvcc knows these two since 12.8, and lists them.
    known = output(find_nvcc(), "--list-gpu-arch")
    newer = [arch for arch in ("sm_100", "sm_120") if arch.replace("sm", "compute") in known]
    every = ["sm_80", "sm_90a", *newer]
    wanted = os.environ.get("FASTATTN_CUDA", "").split(",")
    for arch in every if wanted == [""] else wanted:
        assert elf.count(f".{arch}.cubin") >= sources, elf
    if wanted == [""]:
        assert ptx.count(".sm_90.ptx") >= sources, ptx


def test_it_needs_torch_alone(library):
    """The CUDA runtime is linked in, because torch's may be another version."""
    needed = [line for line in output("readelf", "-d", library).splitlines() if "NEEDED" in line]
    names = {line.split("[")[1].rstrip("]").split(".so")[0] for line in needed}
    assert {"libtorch_cpu", "libtorch_cuda"} <= names
    assert not {n for n in names if n.startswith(("libcudart", "libcuda", "libpython"))}


def test_it_exports_nothing(library):
    symbols = output("nm", "-D", "--defined-only", library).split("\n")
    assert [line for line in symbols if line] == []


PROGRAM = """
import sys, torch, fastattn
torch.ops.load_library(sys.argv[1])
for name in ("cuda_forward", "cuda_backward"):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"fastattn::{name}", "CUDA") and not has(f"fastattn::{name}", "CPU"), name
"""


def test_torch_loads_it_and_finds_the_operators(library):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(STUB.parent)}
    command = [sys.executable, "-c", PROGRAM, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
