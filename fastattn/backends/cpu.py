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


def instruction_set() -> str:
    """Which one the kernels use, and why not the one that FASTATTN_CPU_ISA names."""
    refused = f" ({ops.ISA_ERROR})" if ops.ISA_ERROR else ""
    return torch.ops.fastattn.cpu_isa() + refused


forward, backward = ops.CPU.forward, ops.CPU.backward


def self_attention(
    p: Problem,
    x: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """``p`` between the projections of nn.MultiheadAttention: (output like ``x``, weights).

    Without masks, dropout or autograd; see ``modules/plain.py``.
    """
    return ops.self_attention(
        x, in_weight, in_bias, out_weight, out_bias, p.H, p.scale, p.weights, batch_first
    )
