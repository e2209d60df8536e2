"""Compiles launchers' kernels without a GPU, and says what the machine code uses.

    python tests/kernels/aot.py sm_90 2        every row of config.py for 2-byte elements, as JSON

A driver that only names its architecture stands in for the real one, and launches compile instead
of running. Tensors are on the meta device. Not in the interpreter: run it in its own process.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

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
        "tensor_core_products": len(re.findall(r"wgmma\.mma_async|mma\.sync", kernel.asm["ptx"])),
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


# The features whose code is largest: what compiles with all of them compiles with some of them.
MASKED = dict(causal=True, kv_len=(2, 1024), keep=(2, 1, 1024, 1024))
RICH = dict(MASKED, Hkv=2, dropout_p=0.1, bias=(2, 4, 1024, 1024), weights="full")


def compile_row(dtype, head_size: int, features: dict) -> None:
    """Forward and backward of one problem."""
    from fastattn.kernels.launch import empty_forward
    from fastattn.kernels.sdpa_bwd import launch_sdpa_bwd
    from fastattn.kernels.sdpa_fwd import launch_sdpa_fwd

    problem = call(dtype, head_size, **features)
    launch_sdpa_fwd(problem)
    out, lse, weights = empty_forward(problem)
    grad_weights = None if problem.weights == "none" else weights
    launch_sdpa_bwd(
        problem, out, lse, torch.empty_like(out), None, grad_weights, problem.bias is not None
    )


def main(arch: str, size: str) -> None:
    compiled = compile_only(arch)
    found = []
    dtype = {2: torch.bfloat16, 4: torch.float32}[int(size)]
    with tempfile.TemporaryDirectory() as folder:
        for head_size in (64, 128, 256):
            problems = dict(causal=dict(causal=True), masked=MASKED, rich=RICH)
            for name, features in problems.items() if size == "2" else [("rich", RICH)]:
                compiled.clear()
                compile_row(dtype, head_size, features)
                for kernel in compiled:
                    entry = usage(kernel, Path(folder))
                    found.append(dict(entry, head_size=head_size, problem=name))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
