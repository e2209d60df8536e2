"""Descriptors of products of warpgroups: those that Triton's compiler makes for the same tiles.

A simulator cannot tell whether its author read the documentation of descriptors correctly.
"""

import ctypes
import json
import os
import re
import subprocess
import sys

import host_build
import pytest
import shim_backend
import torch

from fastattn import scaled_dot_product_attention
from fastattn.backends import triton

pytestmark = [
    pytest.mark.skipif(not host_build.compiler(), reason="no C++ compiler"),
    pytest.mark.skipif(not triton.INSTALLED, reason="no Triton"),
    pytest.mark.skipif(shim_backend.ON_GPU, reason="a GPU shows no descriptors"),
]

FROM_SHARED, FROM_REGISTERS = slice(0, 8), slice(8, 16)  # Q K^T and P V of a tile, 16 dims each


@pytest.fixture(scope="module")
def of_triton() -> list[dict]:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(host_build.ROOT / "build/triton")
    script = host_build.ROOT / "tests/cuda/triton_products.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture
def ours(monkeypatch) -> list[tuple[int, int]]:
    """(A, B) of the products of a warp. A is 0 where it is in registers."""
    backend = shim_backend.install(monkeypatch)
    monkeypatch.setenv("FASTATTN_CUDA_PATH", "wgmma")
    q, k, v = (torch.randn(1, 1, 128, 128).bfloat16() for _ in range(3))
    scaled_dot_product_attention(q, k, v, backend=backend)
    numbers = (ctypes.c_uint64 * 64)()
    count = ctypes.CDLL(str(shim_backend.library())).shim_descriptors(numbers, 32)
    return [(numbers[2 * n], numbers[2 * n + 1]) for n in range(count)]


def without_address(descriptors: list[int]) -> list[int]:
    """Relative to the address field of the first, in 14 bits."""
    return [x - (descriptors[0] & 0x3FFF) for x in descriptors]


def test_scores(ours, of_triton):
    for operand in 0, 1:
        found = [pair[operand] for pair in ours[FROM_SHARED]]
        expected = [product["descriptors"][operand] for product in of_triton[FROM_SHARED]]
        assert without_address(found) == without_address(expected)


def test_values(ours, of_triton):
    assert len(ours) == len(of_triton) == 16
    found = [b for _, b in ours[FROM_REGISTERS]]
    expected = [product["descriptors"] for product in of_triton[FROM_REGISTERS]]
    assert {len(x) for x in expected} == {1}  # A is in registers
    assert without_address(found) == without_address([x for [x] in expected])


def test_signs_and_layouts(of_triton):
    text = (host_build.ROOT / "csrc/cuda/base/ptx_wgmma.cuh").read_text()
    found = re.findall(r"keep((?:, \d)+);", text)
    shared, registers = ([int(x) for x in numbers.split(",")[1:]] for numbers in found)
    for product in of_triton[FROM_SHARED]:
        assert product["numbers"][-4:] == shared
    for product in of_triton[FROM_REGISTERS]:
        assert product["numbers"][-3:] == registers
