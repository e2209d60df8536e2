"""Triton kernels (kernels/) for GPUs: fp16, bf16, fp32, every feature, no M * N memory.

The kernels run behind operators of their own with the schemas of ``ops.py``, so that torch.compile
and export see one opaque call. Triton itself is imported when the first of them runs.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from fastattn import ops
from fastattn.problem import Problem

MAX_HEAD_SIZE = 256


def unsupported(p: Problem) -> list[str]:
    """Needs Triton, a GPU with tensor cores for bf16, at most fp32, head sizes up to 256."""
    reasons = _machine_reasons(p.device)
    if p.score == "additive":
        reasons.append("the additive score has no Triton kernel yet")
    if p.dtype == torch.float64:
        reasons.append("float64 is left to eager")
    if max(p.D, p.E) > MAX_HEAD_SIZE:
        reasons.append(f"head sizes above {MAX_HEAD_SIZE}: D is {p.D}, E is {p.E}")
    return reasons


@functools.cache
def _machine_reasons(device: torch.device) -> list[str]:
    if importlib.util.find_spec("triton") is None:
        return ["Triton is not installed: pip install triton"]
    return []
