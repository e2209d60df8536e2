"""A GPU that is none, for the host's side of the Triton backend: launches end at the driver.

All of Triton's own host code runs, its C code included. A library of a few lines takes the place
of the CUDA driver, and its launches do nothing. No kernel is compiled, because the host's work does
not depend on machine code. Tensors are on the CPU. A process that has installed it computes
nothing.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

# Of the CUDA driver's functions, those whose results matter. Pointers are what they are.
SOURCE = """
#include <stdint.h>
int cuCtxGetCurrent(void** x) { *x = (void*)1; return 0; }
int cuPointerGetAttribute(uint64_t* x, int attribute, uint64_t ptr) { *x = ptr; return 0; }
"""


def install(arch: str = "sm_90") -> Any:
    """Makes CPU tensors those of a GPU of this architecture. Returns the driver Triton uses."""
    if torch.cuda.is_available():
        raise RuntimeError("the driver's stand-in is for machines without a GPU")
    load_driver()
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    active = types.SimpleNamespace(
        utils=nvidia.CudaUtils(), launcher_cls=nvidia.CudaLauncher,
        get_current_target=lambda: target, get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )  # fmt: skip
    driver.set_active(active)
    JITFunction._do_compile = _take

    from fastattn.backends import triton
    from fastattn.kernels.host import config, launch, prepared

    config.architecture = launch.architecture = lambda device: arch
    prepared.possible = lambda device: True
    triton._interpreted = lambda: True
    return active


def load_driver() -> None:
    """Compiles the driver's stand-in, and loads it under the driver's name.

    The functions are those that Triton's driver.c names: other versions ask for others.
    """
    import triton

    asked = Path(triton.__file__).parent.joinpath("backends/nvidia/driver.c").read_text()
    names = {*re.findall(r"\bcu[A-Z]\w+", asked)} - {*re.findall(r"\bcu[A-Z]\w+", SOURCE)}
    source = SOURCE + "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names))
    folder = tempfile.mkdtemp()
    library = Path(folder, "libcuda.so.1")
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*compiler, "-x", "c", "-", "-o", library], input=source, text=True, check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


KERNELS: dict[int, Any] = {}  # by the driver's handle, which is none


def _take(function, key, signature, device, constexprs, options, attrs, warmup):
    """In place of ``JITFunction._do_compile``: a kernel with a launcher, and no machine code."""
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel

    asked = key, signature, function.device_caches[device][2], device, constexprs, options, [attrs]
    if function._call_hook(knobs.runtime.jit_cache_hook, *asked, warmup):
        return None
    source = function.ASTSource(function, signature, constexprs, attrs)
    about = dict(
        num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
    )  # fmt: skip
    kernel = object.__new__(CompiledKernel)
    kernel.src, kernel.name, kernel.hash = source, function.__name__, ""
    kernel.metadata = types.SimpleNamespace(**about)
    kernel.packed_metadata = (options.num_warps, 1, 0)
    kernel.module = kernel.function = len(KERNELS) + 1
    KERNELS[kernel.function] = kernel
    kernel._run = CudaLauncher(source, kernel.metadata)
    function.device_caches[device][0][key] = kernel
    return kernel
