"""Fused C++ kernels for CPUs (csrc/cpu): fp32, bf16, fp16, every feature, no M * N memory."""

from __future__ import annotations

import functools
import math
import platform
import sys
import warnings
from pathlib import Path

import torch

from fastattn.backends import operators
from fastattn.problem import Problem, arguments
from fastattn.problem.record import SCORES, natural_scale


def unsupported(p: Problem) -> list[str]:
    """Needs the compiled extension, CPU tensors, and fp32 or a smaller dtype."""
    reasons = []
    if p.device.type != "cpu":
        reasons.append(f"tensors are on {p.device.type}")
    if p.dtype == torch.float64:
        reasons.append("float64 is left to eager")
    if operators.EXTENSION_ERROR is not None:
        reasons.append(operators.EXTENSION_ERROR)
    return reasons


def instruction_set() -> str:
    """The instruction set in use, and why it is not the one that FASTATTN_CPU_ISA names."""
    refused = f" ({operators.ISA_ERROR})" if operators.ISA_ERROR else ""
    return torch.ops.fastattn.cpu_isa() + refused


def path(p: Problem, bias: bool = False, contiguous_keys: bool = True) -> str:
    """The path of the forward pass through the kernels, in words, or what FASTATTN_CPU_PATH forces.

    ``bias`` says whether there is a bias, ``contiguous_keys`` whether the keys' last stride is 1.
    """
    lo, hi = p.band()
    keep = p.mask.keep
    return torch.ops.fastattn.cpu_path(
        *(p.B, p.H, p.Hkv, p.M, p.N, p.D, p.dtype, contiguous_keys),
        *(SCORES[p.score], bias, keep is not None and keep.shape[-2] > 1),
        *(p.dropout is not None, p.weights != "none"),
        -p.M if lo is None else lo,
        p.N if hi is None else hi,
    )


# ---- where the kernels are missing ----


def _remedy() -> str | None:
    """How to get the kernels; None if they are here, left out, or not written for the CPU."""
    if operators.EXTENSION_ERROR is None or operators.EXTENSION_LEFT_OUT:
        return None
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    if Path(operators.__file__).parents[2].joinpath("setup.py").exists():  # a checkout
        return "`make build` compiles the kernels"
    # pip caches the wheels that it builds, and reuses one without kernels.
    return (
        "with a C++ compiler (c++, CXX) on the machine, this command compiles the kernels, in the "
        "folder of fastattn's sources: pip install --no-cache-dir --force-reinstall --no-deps ."
    )


REMEDY = _remedy()


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        f"{operators.EXTENSION_ERROR}: fastattn runs in plain PyTorch on this CPU, with more time "
        f"and memory; {REMEDY}",
        RuntimeWarning,
        stacklevel=6,  # the caller of a public function
    )


@arguments.traced_as_constant
def warn_of_missing_kernels() -> None:
    """Warns at the first call that lacks the kernels, if they can be had."""
    if REMEDY is not None:
        _warn_once()


forward, backward = operators.CPU.forward, operators.CPU.backward


def shift_unit(p: Problem, biased: bool) -> float:
    """See ``registry.Backend``. The same as ``natural`` in csrc/cpu/tile/masking.h."""
    score = abs(p.scale) if p.score == "dot" else math.log(2)
    return 1.0 if biased else natural_scale(p, score)
