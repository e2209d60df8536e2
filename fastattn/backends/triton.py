"""Triton kernels (kernels/) for GPUs: fp16, bf16, fp32, every feature.

They run behind their own operators, with the schemas of ``problem/schemas.py``, so that
torch.compile and export see one opaque call. The first run imports Triton.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn.backends import _gpu, operators
from fastattn.problem import Problem, arguments, schemas


def _is_installed() -> bool:
    spec = importlib.util.find_spec("triton")
    return spec is not None and spec.origin is not None  # a mere folder of this name has none


INSTALLED = _is_installed()
# What packages of torch's own builds are called.
DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")
MAX_HEAD_SIZE = 256


def unsupported(p: Problem) -> list[str]:
    """Needs Triton, a GPU whose tensor cores it supports, fp32 or less, head sizes up to 256."""
    reasons = _machine_reasons(p.device)
    if p.dtype == torch.float64:
        reasons.append("float64 is left to eager")
    if max(p.D, p.E) > MAX_HEAD_SIZE:
        reasons.append(f"head sizes end at {MAX_HEAD_SIZE}: D is {p.D}, E is {p.E}")
    return reasons


# ---- what the machine can do ----


def version() -> str | None:
    """The version of Triton, without its import; None where it is not installed."""
    for name in DISTRIBUTIONS if INSTALLED else ():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown" if INSTALLED else None


@arguments.traced_as_constant
def _machine_reasons(device: torch.device) -> list[str]:
    if not INSTALLED:
        return ["Triton is not installed: pip install triton"]
    if device.type == "cpu" and _interpreted():
        return []
    return _gpu.reasons(device)


def _interpreted() -> bool:
    """Whether the kernels were imported with TRITON_INTERPRET=1, as in tests without a GPU."""
    module = sys.modules.get("fastattn.kernels.loop.forward")
    return module is not None and not hasattr(module.sdpa_fwd_kernel, "device_caches")


# ---- the operators ----


def _forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return run(launch_forward, args)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    return run(launch_backward, args)


def run(launch: Callable[..., tuple[Tensor, ...]], args: tuple) -> Any:
    """``launch(*args)``, from its plan if this is a repeated call."""
    with current_device(args[0].device):
        return _prepared()(launch, args)


@functools.cache
def _prepared() -> Callable:
    from fastattn.kernels.host import prepared  # imports Triton

    return prepared.run


def launch_forward(*args: Any) -> tuple[Tensor, ...]:
    """What the forward operator does, without plans."""
    from fastattn.kernels.host import check, together, tuned
    from fastattn.kernels.host.launch import Call
    from fastattn.kernels.loop.additive_forward import launch_additive_fwd
    from fastattn.kernels.loop.forward import launch_sdpa_fwd

    shared, sink = schemas.split_forward(args)
    call = Call.of(*shared)
    check.sink(call, sink)
    launch = launch_sdpa_fwd if call.w is None else launch_additive_fwd
    return tuned.fall_back(call.q.device, lambda: together.run(lambda: launch(call, sink)))


def launch_backward(*args: Any) -> tuple[Tensor, ...]:
    """The same of the backward operator."""
    from fastattn.kernels.host import check, together, tuned
    from fastattn.kernels.host.launch import Call
    from fastattn.kernels.loop.additive_backward import launch_additive_bwd
    from fastattn.kernels.loop.backward import launch_sdpa_bwd

    shared, saved = schemas.split_backward(args)
    call = Call.of(*shared)
    check.saved(call, saved)
    # Those of a block are parts of the whole's. Kernels take what belongs to rows as contiguous.
    lse = None if saved.grad_lse is None else saved.grad_lse.contiguous()
    saved = saved._replace(stats=saved.stats.contiguous(), grad_lse=lse)
    launch = launch_sdpa_bwd if call.w is None else launch_additive_bwd
    return tuned.fall_back(call.q.device, lambda: together.run(lambda: launch(call, saved)))


def current_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


OPERATORS = operators.Operators("triton_")
for _key in ("CUDA", "CPU"):  # CPU tensors occur only when the kernels are interpreted
    OPERATORS.implement(_key, _forward, _backward)
forward, backward, shift_unit = OPERATORS.forward, OPERATORS.backward, _gpu.shift_unit
