"""Every configuration of config.py, compiled for sm_80 and sm_90: registers, spills, shared memory.

In processes of their own, since this one interprets kernels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastattn.kernels import config

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHARED_MEMORY = {"sm_80": 166_912, "sm_90": 232_448}  # bytes that one block may have


def compile_all(arch: str, size: int) -> list[dict]:
    """What aot.py prints: an entry a compiled kernel. Its cache is in build/: reruns are quick."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(ROOT / "build/triton"),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HERE / "aot.py"), arch, str(size)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


# Bytes of spills that are left, by head size; 0 where nothing is said. They may only shrink.
SPILLS = {
    ("sm_80", 2): {64: 32, 128: 16, 256: 448},
    ("sm_90", 2): {256: 128},
    # Triton keeps the operands of exact fp32 products in registers.
    ("sm_90", 4): {64: 1024, 128: 2048, 256: 4096},
}
PRODUCTS = ("sdpa_fwd_kernel", "sdpa_bwd_dq_kernel", "sdpa_bwd_dkdv_kernel")


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "size"), SPILLS, ids=str)
def test_every_configuration(arch, size):
    kernels = compile_all(arch, size)
    assert {k["name"] for k in kernels} >= {"classify_kernel", "compact_kernel", *PRODUCTS}
    for k in kernels:
        assert k["shared"] <= SHARED_MEMORY[arch], k
        assert k["registers"] <= 255, k
        assert k["stack"] <= SPILLS[arch, size].get(k["head_size"], 0), k
        if size == 2 and k["name"] in PRODUCTS:
            assert k["tensor_core_products"] > 0, k


def test_every_architecture_has_every_row():
    archs = {key for rows in config.TABLE.values() for key in rows}
    assert {a for a, _ in archs} == {"sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "interpreter"}
    for kernel, rows in config.TABLE.items():
        assert rows.keys() == archs, kernel
        assert all(row.keys() == set(config.HEAD_SIZES) for row in rows.values()), kernel


@pytest.mark.parametrize(("size", "padded"), [(0, 16), (1, 16), (17, 32), (64, 64), (65, 128)])
def test_head_sizes_are_padded(size, padded):
    assert config.padded(size) == padded
