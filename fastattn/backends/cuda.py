"""CUDA C++ kernels (csrc/cuda) for NVIDIA GPUs: additive attention, and SDPA in half precision.

A library of its own (fastattn/_cuda.so), loaded where torch has CUDA.
"""

from __future__ import annotations

import torch

from fastattn import ops
from fastattn.backends import gpu
from fastattn.problem import Problem

MAX_HEAD_SIZE = 128  # of the dot product, whose sums stay in registers
HALF = (torch.float16, torch.bfloat16)

OPERATORS = ops.Operators("cuda_")


def unsupported(p: Problem) -> list[str]:
    """Needs the library, a GPU of compute capability 8.0; SDPA also half precision, D, E <= 128."""
    reasons = gpu.reasons(p.device)
    if not reasons and LIBRARY_ERROR is not None:
        reasons.append(LIBRARY_ERROR)
    if p.dtype == torch.float64:
        reasons.append("float64 is left to eager")
    elif p.score == "dot" and p.dtype not in HALF:
        reasons.append("the dot product is written for float16 and bfloat16")
    if p.score == "dot" and max(p.D, p.E) > MAX_HEAD_SIZE:
        reasons.append(f"head sizes end at {MAX_HEAD_SIZE}: D is {p.D}, E is {p.E}")
    return reasons


forward, backward = OPERATORS.forward, OPERATORS.backward


# ---- the library ----


def _load_library() -> str | None:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    error = ops.load("_cuda.so", "cuda", "reason")
    return error and f"the CUDA library {error}"


LIBRARY_ERROR = _load_library()
