"""CUDA C++ kernels (csrc/cuda) for NVIDIA GPUs: all scores, dot products in half types alone.

A separate library (fastattn/_cuda.so), loaded if torch has CUDA.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import _gpu, operators
from fastattn.problem import Problem, arguments
from fastattn.problem.record import Grads

# D and E; csrc/cuda/dispatch.cu's own. wgmma.py says who can have more than 128 of a dot product.
MAX_HEAD_SIZE = {"dot": (256, 256), "additive": (4096, 256), "gaussian": (4096, 256)}
HALF = (torch.float16, torch.bfloat16)

OPERATORS = operators.Operators("cuda_")


def unsupported(p: Problem) -> list[str]:
    """Needs the library and a GPU of compute capability 8.0; SDPA also needs half precision."""
    reasons = _gpu.reasons(p.device)
    if not reasons and LIBRARY_ERROR is not None:
        reasons.append(LIBRARY_ERROR)
    if p.dtype == torch.float64:
        reasons.append("float64 is left to eager")
    elif p.score == "dot" and p.dtype not in HALF:
        reasons.append("the dot product is written for float16 and bfloat16")
    if p.wide and p.score == "dot":
        reasons.append("wide results of the dot product are left to Triton")
    most = MAX_HEAD_SIZE[p.score]
    if p.D > most[0] or p.E > most[1]:
        reasons.append(f"D ends at {most[0]} and E at {most[1]}, here they are {p.D} and {p.E}")
    return reasons


forward, shift_unit = OPERATORS.forward, _gpu.shift_unit


def backward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None, *saved: Any
) -> Grads:
    """See ``registry.Backend``.

    The fast kernels of the dot product cannot read an expanded gradient, as that of a sum.
    """
    out, stats, grad_out, *others = saved
    if p.score == "dot" and not has_tensor_map(grad_out):
        grad_out = grad_out.contiguous()
    return OPERATORS.backward(p, q, k, v, w, bias, out, stats, grad_out, *others)


# ---- the library ----


def _load_library() -> str | None:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    error = operators.load("_cuda.so", "cuda", "reason")
    if error is not None:
        return f"the CUDA library {error}"
    return driver_error(operators.build_info("cuda", "runtime"), driver_version())


def driver_version() -> str | None:
    """The newest CUDA version that the driver supports, such as "13.0"; None without a driver."""
    try:
        number = ctypes.c_int(0)
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def has_tensor_map(x: Tensor) -> bool:
    """Whether copies by tensor maps can read a tensor, as csrc/cuda/base/tensor_map.h says.

    A single column has no stride there.
    """
    if torch.compiler.is_compiling():
        return _may_have_tensor_map(x)
    if not arguments.has_memory(x):
        return False
    *outer, column = x.stride()
    if x.data_ptr() % 16 or column != 1 or x.shape[3] == 1 or x.shape[2] > 2**31 - 256:
        return False
    strides = zip(x.shape, outer, strict=False)
    return all(n == 1 or (0 < s < 2**38 and s % 8 == 0) for n, s in strides)


def _may_have_tensor_map(x: Tensor) -> bool:
    """The same in compiled code, which knows neither addresses nor how large symbols are.

    The kernels look at these when they run. A head's size is guarded, if it is a symbol.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy

    *outer, column = x.stride()
    if not guard_or_false(column == 1) or guard_or_false(x.shape[3] == 1):
        return False
    # A stride that a head's size rules out comes first: those of more dims would guard their sizes.
    strides = reversed([*zip(x.shape, outer, strict=False)])
    return all(
        guard_or_false(n == 1) or (guard_or_false(s % 8 == 0) and not guard_or_false(s == 0))
        for n, s in strides
    )


def driver_error(runtime: str | None, driver: str | None) -> str | None:
    """Why the driver cannot run the library. It can within a major version of CUDA."""
    if not runtime or driver is None or int(driver.split(".")[0]) >= int(runtime.split(".")[0]):
        return None
    return (
        f"the CUDA library is built with CUDA {runtime}, and this driver ends at {driver}: "
        "install a newer driver, or build with an nvcc of its version"
    )


LIBRARY_ERROR = _load_library()
