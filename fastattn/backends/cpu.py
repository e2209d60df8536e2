"""Fused C++ kernels for CPUs (csrc/cpu): fp32, bf16, fp16, every feature, no M * N memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import ops
from fastattn.problem import Problem


def unsupported(p: Problem) -> list[str]:
    """Needs the compiled extension, CPU tensors, and at most fp32."""
    reasons = []
    if p.device.type != "cpu":
        reasons.append(f"tensors are on {p.device.type}")
    if p.dtype == torch.float64:
        reasons.append("float64 is left to eager")
    if ops.EXTENSION_ERROR is not None:
        reasons.append(ops.EXTENSION_ERROR)
    return reasons


def forward(p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None):
    """See ``registry.Backend``."""
    return torch.ops.fastattn.forward(q, k, v, w, bias, *p.tensors(), *ops.scalars(p), p.weights)


def backward(p, q, k, v, w, bias, out, stats, grad_out, grad_lse, grad_weights, bias_needs_grad):
    """See ``registry.Backend``."""
    grad_q, grad_k, grad_v, grad_w, grad_bias = torch.ops.fastattn.backward(
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
