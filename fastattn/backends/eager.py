"""Plain PyTorch: any device and float dtype, some rows and heads at a time.

``problem/reference.py`` has the formulas. They write out every pair, times D but for the dot
product. So a large problem is cut into blocks of rows, each with the keys that its rows may keep.
Compiled code is one block, and so is all else that has no memory of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn import blocks
from fastattn.blocks import Cut
from fastattn.problem import Problem, arguments, reference
from fastattn.problem.record import Grads, empty_out, laid_out
from fastattn.problem.schemas import Saved

# Numbers of a matrix of a block, on a CPU for each thread: found on AMD Zen 4 alone (0036). That of
# other devices was not run on one.
_NUMBERS_OF_THREAD = 2**18
_NUMBERS = 2**26


def unsupported(p: Problem) -> list[str]:
    """Supports every problem."""
    return []


def forward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``registry.Backend``."""
    cuts = _cuts(p, q)
    with arguments.no_autocast(p.device.type):
        if len(cuts) == 1:
            out, lse, weights, stats = reference.forward(p, q, k, v, w, bias, sink)
            out = laid_out(q, out.to(p.result_dtype))
            # No result is a view: torch refuses in-place work on views that a Function returns.
            return out.detach(), lse.detach(), weights.to(p.dtype), stats
        out, rows = empty_out(q, p.E, p.result_dtype), (p.B, p.H, p.M)
        lse, stats = (q.new_empty(*rows, *end, dtype=p.acc_dtype) for end in ((), (2,)))
        weights = q.new_zeros(p.weights_shape())
        for cut, block, tensors in blocks.each(p, cuts, q, k, v, w, bias):
            own = None if sink is None else blocks.of_heads(sink, cut)
            part = reference.forward(block, *tensors, sink=own)
            for whole, x in ((out, part[0]), (lse, part[1]), (stats, part[3])):
                blocks.rows_of(whole, cut).copy_(x)
            if p.weights != "none":
                blocks.weights_of(p, weights, cut).copy_(part[2])
    return out, lse, weights, stats


def shift_unit(p: Problem, biased: bool) -> float:
    """See ``registry.Backend``."""
    return 1.0


def backward(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None, *saved: Any
) -> Grads:
    """See ``registry.Backend``."""
    given, cuts = Saved(*saved), _cuts(p, q)
    compute = _backward if len(cuts) == 1 else _sums
    with arguments.no_autocast(p.device.type):
        grads = compute(p, (q, k, v, w, bias), given, cuts)
    grad_q, grad_k, grad_v, grad_w, grad_bias, grad_sink = grads
    grad_q, grad_k, grad_v = (grad.to(p.result_dtype) for grad in (grad_q, grad_k, grad_v))
    if bias is None or not given.bias_needs_grad:
        return grad_q, grad_k, grad_v, grad_w, None, grad_sink
    return grad_q, grad_k, grad_v, grad_w, grad_bias.to(bias.dtype), grad_sink


def _backward(p: Problem, inputs: tuple[Any, ...], given: Saved, _: Any = None) -> tuple[Any, ...]:
    """Gradients of the inputs, in ``p.acc_dtype``."""
    return reference.backward(
        p, *inputs, sink=given.sink, grad_out=given.grad_out, grad_lse=given.grad_lse,
        grad_weights=given.grad_weights, out=given.out, stats=given.stats,
    )  # fmt: skip


def _sums(p: Problem, inputs: tuple[Any, ...], given: Saved, cuts: list[Cut]) -> list[Any]:
    """The same by blocks, whose parts of a gradient add up: on CPUs these are small and many."""
    q, k, v, w, bias = inputs
    dtype = torch.float64 if q.device.type == "cpu" else p.acc_dtype
    sums: list[Any] = [x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v)]
    sums.append(None if w is None else q.new_zeros(p.B, p.H, p.D, dtype=dtype))
    sums.append(None if bias is None else bias.new_zeros(bias.shape, dtype=dtype))
    sums.append(None if given.sink is None else q.new_zeros(p.B, p.H, dtype=dtype))
    for cut, block, tensors in blocks.each(p, cuts, *inputs):
        rows = {
            name: blocks.rows_of(x, cut)
            for name in ("out", "stats", "grad_out", "grad_lse")
            if (x := getattr(given, name)) is not None
        }
        own = given._replace(**rows)
        if given.grad_weights is not None:
            own = own._replace(grad_weights=blocks.weights_of(p, given.grad_weights, cut))
        if given.sink is not None:
            own = own._replace(sink=blocks.of_heads(given.sink, cut))
        grads = _backward(block, tensors, own)
        of_sink = None if given.sink is None else blocks.of_heads(sums[5], cut)
        totals = *blocks.tensors_of(p, cut, *sums[:5]), of_sink
        for total, grad in zip(totals, grads, strict=True):
            if total is not None:
                total += grad
    for n in (3, 5):
        sums[n] = None if sums[n] is None else sums[n].to(p.acc_dtype)
    return sums


# ---- blocks ----


def _cuts(p: Problem, q: Tensor) -> list[Cut]:
    if not arguments.has_memory(q):
        return [blocks.whole(p)]
    on_cpu = q.device.type == "cpu"
    return blocks.by_rows(p, _NUMBERS_OF_THREAD * torch.get_num_threads() if on_cpu else _NUMBERS)
