"""Triton kernels (kernels/) for GPUs: fp16, bf16, fp32, every feature, no M * N memory.

They run behind operators of their own, with the schemas of ``ops.py``'s, so that
torch.compile and export see one opaque call. Triton is imported when the first of them runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys

import torch
from torch import Tensor

from fastattn import ops
from fastattn.problem import Problem

INSTALLED = importlib.util.find_spec("triton") is not None
SCORES = ("dot", "additive")
MAX_HEAD_SIZE = 256
MIN_CAPABILITY = (8, 0)  # older tensor cores have no path in Triton, nor bf16


def unsupported(p: Problem) -> list[str]:
    """Needs Triton, a GPU that it has tensor cores for, at most fp32, head sizes up to 256."""
    reasons = _machine_reasons(p.device)
    if p.score not in SCORES:
        reasons.append(f"no Triton kernel for the {p.score} score")
    if p.dtype == torch.float64:
        reasons.append("float64 is left to eager")
    if max(p.D, p.E) > MAX_HEAD_SIZE:
        reasons.append(f"head sizes end at {MAX_HEAD_SIZE}: D is {p.D}, E is {p.E}")
    return reasons


def forward(p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None):
    """See ``registry.Backend``."""
    return torch.ops.fastattn.triton_forward(
        q, k, v, w, bias, *p.tensors(), *ops.scalars(p), p.weights
    )


def backward(p, q, k, v, w, bias, out, stats, grad_out, grad_lse, grad_weights, bias_needs_grad):
    """See ``registry.Backend``."""
    grad_q, grad_k, grad_v, grad_w, grad_bias = torch.ops.fastattn.triton_backward(
        q, k, v, w, bias, *p.tensors(), *ops.scalars(p), p.weights,
        out, stats, grad_out, grad_lse, grad_weights, bias_needs_grad,
    )  # fmt: skip
    return (
        grad_q,
        grad_k,
        grad_v,
        grad_w if w is not None else None,
        grad_bias if bias_needs_grad else None,
    )


# ---- what the machine can do ----


def _machine_reasons(device: torch.device) -> list[str]:
    if not INSTALLED:
        return ["Triton is not installed: pip install triton"]
    if device.type != "cuda":
        if device.type == "cpu" and _interpreted():
            return []
        missing = "" if torch.cuda.is_available() else "; torch sees no CUDA device"
        return [f"tensors are on {device.type}{missing}"]
    return _gpu_reasons(device)


# What torch.compiler.assume_constant_result does, less its import of half a second: nothing in
# there can be traced, and machines do not change.
_machine_reasons._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _gpu_reasons(device: torch.device) -> list[str]:
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        return [f"compute capability {have}: {need} or newer is needed"]
    return []


def _interpreted() -> bool:
    """Whether the kernels were imported with TRITON_INTERPRET=1, as the tests do without a GPU."""
    module = sys.modules.get("fastattn.kernels.sdpa_fwd")
    return module is not None and not hasattr(module.sdpa_fwd_kernel, "device_caches")


# ---- the operators ----


def _forward(*args):
    from fastattn.kernels.additive_fwd import launch_additive_fwd
    from fastattn.kernels.launch import Call
    from fastattn.kernels.sdpa_fwd import launch_sdpa_fwd

    call = Call(*args)
    launch = launch_sdpa_fwd if call.w is None else launch_additive_fwd
    with _current_device(call.q):
        return launch(call)


def _backward(*args):
    from fastattn.kernels.additive_bwd import launch_additive_bwd
    from fastattn.kernels.launch import Call
    from fastattn.kernels.sdpa_bwd import launch_sdpa_bwd

    n = len(Call._fields)
    call = Call(*args[:n])
    launch = launch_sdpa_bwd if call.w is None else launch_additive_bwd
    with _current_device(call.q):
        return launch(call, *args[n:])


def _current_device(x: Tensor):
    """Triton launches on the current device, whose tensors these need not be."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


_LIBRARY = torch.library.Library("fastattn", "FRAGMENT")


def _register(name: str, implementation) -> None:
    """fastattn::triton_<name>, with the schema and the fake kernel of fastattn::<name>."""
    model = getattr(torch.ops.fastattn, name)
    signature = str(model.default._schema).removeprefix(f"fastattn::{name}")
    _LIBRARY.define(f"triton_{name}{signature}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CUDA", "CPU"):  # CPU tensors come only when the kernels are interpreted
        _LIBRARY.impl(f"triton_{name}", implementation, key)
    torch.library.register_fake(f"fastattn::triton_{name}", model, lib=_LIBRARY)


_register("forward", _forward)
_register("backward", _backward)
