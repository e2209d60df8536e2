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

SCORES = slice(0, 8)  # of a tile, 16 dims each
VALUES = slice(8, 16)  # P V, 16 keys each
# Of a backward pass: Q K^T and dO V^T, 16 dims each.
SHARED = {"dkdv": (SCORES, slice(8, 16)), "dq": (SCORES, slice(12, 20))}
# P^T dO and dS^T Q, 16 queries each; or dS K of the tile before, 16 keys each.
SUMS = {"dkdv": (slice(16, 20), slice(20, 24)), "dq": (slice(8, 12),)}


def of_triton(keys: int) -> list[dict]:
    """Its products of 64 queries with so many keys, of 128 dims."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(host_build.ROOT / "build/triton")
    script = host_build.ROOT / "tests/cuda/triton_products.py"
    done = subprocess.run(
        [sys.executable, str(script), str(keys)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def forward() -> list[dict]:
    return of_triton(128)


@pytest.fixture(scope="module")
def backward() -> list[dict]:
    return of_triton(64)


@pytest.fixture
def ours(monkeypatch):
    """(A, B) of the products of a warp in a pass. A is 0 where it is in registers."""
    backend = shim_backend.install(monkeypatch)
    monkeypatch.setenv("FASTATTN_CUDA_PATH", "wgmma")

    def latest(count: int, blocks_before: int = 0) -> list[tuple[int, int]]:
        numbers = (ctypes.c_uint64 * (2 * count))()
        library = ctypes.CDLL(str(shim_backend.library()))
        assert library.shim_descriptors(numbers, count, blocks_before) == count
        return [(numbers[2 * n], numbers[2 * n + 1]) for n in range(count)]

    def of_pass(name: str) -> list[tuple[int, int]]:
        q, k, v, grad_out = (torch.randn(1, 1, 128, 128).bfloat16() for _ in range(4))
        out = scaled_dot_product_attention(q.requires_grad_(), k, v, backend=backend)
        if name == "forward":
            return latest(16)
        out.backward(grad_out)
        return latest(24, blocks_before=name == "dq")  # dK and dV come last

    return of_pass


def without_address(descriptors: list[int]) -> list[int]:
    """Relative to the address field of the first, in 14 bits."""
    return [x - (descriptors[0] & 0x3FFF) for x in descriptors]


def assert_from_shared(found, expected) -> None:
    for operand in 0, 1:
        of_triton = [product["descriptors"][operand] for product in expected]
        assert without_address([x[operand] for x in found]) == without_address(of_triton)


def assert_from_registers(found, expected) -> None:
    """B alone has a descriptor; Triton's product may have A in shared memory."""
    of_triton = [product["descriptors"][-1] for product in expected]
    assert {a for a, _ in found} == {0}
    assert without_address([b for _, b in found]) == without_address(of_triton)


def test_forward(ours, forward):
    found = ours("forward")
    assert len(forward) == 16
    assert_from_shared(found[SCORES], forward[SCORES])
    assert_from_registers(found[VALUES], forward[VALUES])


@pytest.mark.parametrize("kernel", SUMS)
def test_backward(kernel, ours, backward):
    found = ours(kernel)
    assert len(backward) == 12
    for products in SHARED[kernel]:
        assert_from_shared(found[products], backward[SCORES])
    for products in SUMS[kernel]:
        assert_from_registers(found[products], backward[8:])


def test_signs_and_layouts(forward, backward):
    text = (host_build.ROOT / "csrc/cuda/base/ptx_wgmma.cuh").read_text()
    found = re.findall(r'keep((?:, \d)+)(?:;|, %" transposed_at)', text)
    shared, registers = ([int(x) for x in numbers.split(",")[1:]] for numbers in found)
    assert '"n"(kTransposed ? 1 : 0)' in text
    for products in forward, backward:
        for product in products[SCORES]:
            assert product["numbers"][-4:] == shared
        for product in products[8:]:
            assert product["numbers"][-3:] == [*registers, 1]
