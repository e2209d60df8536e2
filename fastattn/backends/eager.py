"""Plain PyTorch: any device and float dtype. Memory: M * N, times D but for the dot product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn.problem import Problem, arguments, reference
from fastattn.problem.record import laid_out
from fastattn.problem.schemas import Saved


def unsupported(p: Problem) -> list[str]:
    """Supports every problem."""
    return []


def forward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``registry.Backend``."""
    with arguments.no_autocast(p.device.type):
        out, lse, weights, stats = reference.forward_with_stats(p, q, k, v, w, bias, sink)
    out = laid_out(q, out.to(p.result_dtype))
    # No result is a view: torch refuses in-place work on views that a Function returns.
    return out.detach(), lse.detach(), weights.to(p.dtype), stats


def shift_unit(p: Problem, biased: bool) -> float:
    """See ``registry.Backend``."""
    return 1.0


def backward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None, *saved: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See ``registry.Backend``."""
    given = Saved(*saved)
    with arguments.no_autocast(p.device.type):
        grad_q, grad_k, grad_v, grad_w, grad_bias, _ = reference.backward(
            p, q, k, v, w, bias, None, given.grad_out, given.grad_lse, given.grad_weights,
            given.out, given.stats,
        )  # fmt: skip
    if bias is None or grad_bias is None or not given.bias_needs_grad:
        grad_bias = None
    else:
        grad_bias = grad_bias.to(bias.dtype)
    grad_q, grad_k, grad_v = (grad.to(p.result_dtype) for grad in (grad_q, grad_k, grad_v))
    return grad_q, grad_k, grad_v, grad_w, grad_bias
