"""CUDA C++ kernels (csrc/cuda) for NVIDIA GPUs: additive attention, and SDPA in half precision.

A library of its own (fastattn/_cuda.so), loaded where torch has CUDA.
"""

from __future__ import annotations

import torch

from fastattn import ops
from fastattn.backends import gpu
from fastattn.problem import Problem

MAX_HEAD_SIZE = {"dot": (128, 128), "additive": (4096, 256)}  # D and E; csrc/cuda/launch.cu's own
HALF = (torch.float16, torch.bfloat16)

OPERATORS = ops.Operators("cuda_")


def unsupported(p: Problem) -> list[str]:
    """Needs the library, a GPU of compute capability 8.0; SDPA also half precision."""
    reasons = gpu.reasons(p.device)
    if not reasons and LIBRARY_ERROR is not None:
        reasons.append(LIBRARY_ERROR)
    if p.dtype == torch.float64:
        reasons.append("float64 is left to eager")
    elif p.score == "dot" and p.dtype not in HALF:
        reasons.append("the dot product is written for float16 and bfloat16")
    most = MAX_HEAD_SIZE[p.score]
    if p.D > most[0] or p.E > most[1]:
        reasons.append(f"D ends at {most[0]} and E at {most[1]}, here they are {p.D} and {p.E}")
    return reasons


forward, backward = OPERATORS.forward, OPERATORS.backward


# ---- the library ----


def _load_library() -> str | None:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    error = ops.load("_cuda.so", "cuda", "reason")
    return error and f"the CUDA library {error}"


LIBRARY_ERROR = _load_library()
