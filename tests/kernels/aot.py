"""Compiles launchers' kernels without a GPU, and says what the machine code uses.

A driver that only names its architecture stands in for the real one, and launches compile instead
of running. Tensors are on the meta device. Not in the interpreter: run it in its own process.
"""

import re
import subprocess
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = {"sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448, "sm_100": 232_448}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Driver:
    """As much of a driver as compiling asks for."""

    def __init__(self, arch: str):
        self.target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(arch: str) -> list:
    """From now on launches compile; returns the list that the compiled kernels are added to."""
    from fastattn.kernels import config

    driver.set_active(Driver(arch))
    config.architecture = lambda device: arch
    compiled = []
    run = JITFunction.run

    def warmup(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    JITFunction.run = warmup
    return compiled


def usage(kernel, folder: Path) -> dict:
    """Registers, stack (where spills go), and shared memory of a compiled kernel."""
    path = folder / f"{kernel.hash}.cubin"
    path.write_bytes(kernel.asm["cubin"])
    command = [TOOLS / "cuobjdump", "-res-usage", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {
        "name": kernel.metadata.name,
        "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        "registers": int(found["REG"]),
        "stack": int(found["STACK"]) + int(found["LOCAL"]),
        "shared": kernel.metadata.shared,
    }


def call(dtype, D, E=None, *, B=2, H=4, Hkv=4, M=1024, N=1024, causal=False, **features):
    """A launch.Call over meta tensors."""
    from fastattn.kernels.launch import Call

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    E = D if E is None else E
    tensors = dict.fromkeys(("w", "bias", "kv_len", "keep", "seed"))
    if "bias" in features:
        tensors["bias"] = empty(*features["bias"])
    if "keep" in features:
        tensors["keep"] = empty(*features["keep"], dtype=torch.bool)
    if "kv_len" in features:
        tensors["kv_len"] = empty(*features["kv_len"], dtype=torch.int32)
    dropout_p = features.get("dropout_p", 0.0)
    if dropout_p:
        tensors["seed"] = empty(dtype=torch.int64)
    return Call(
        empty(B, H, M, D), empty(B, Hkv, N, D), empty(B, Hkv, N, E), **tensors,
        band_lo=None, band_hi=0 if causal else None, scale=D**-0.5, dropout_p=dropout_p,
        weights=features.get("weights", "none"),
    )  # fmt: skip
