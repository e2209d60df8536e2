"""Method "gather": all keys and values come to every rank, some heads at a time.

A rank attends with its rows, piece by piece, to all keys: there is nothing to merge, and every mask
and kind of weights works. The next heads are on their way while these are attended to. Backward
gathers again, adds up dK and dV over pieces in float32, and gives each rank the sum of its keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn import blocks
from fastattn.backends import registry
from fastattn.blocks import Cut
from fastattn.distributed import comm
from fastattn.distributed.plan import Plan
from fastattn.problem import Problem
from fastattn.problem.record import empty_out


def check(plan: Plan) -> None:
    """Nothing: this method does every problem."""


def _gathered(plan: Plan, tensors: tuple) -> Iterator[tuple[Cut, Problem, tuple]]:
    """For some heads at a time: (which, their problem, their tensors with all keys)."""

    def start(cut: Cut) -> tuple:
        q, k, v, w, bias = blocks.tensors_of(plan.p, cut, *tensors)
        return q, *(comm.gather(x, 2, plan.keys, plan.group) for x in (k, v)), w, bias

    steps = plan.steps()
    following: Any = start(steps[0]) if steps else ()
    for n, cut in enumerate(steps):
        q, k, v, w, bias = following
        following = start(steps[n + 1]) if n + 1 < len(steps) else ()
        yield cut, blocks.block_of(plan.p, cut), (q, k(), v(), w, bias)


def forward(plan: Plan, *tensors: Any) -> tuple[Tensor, ...]:
    """(out, lse, weights, stats) of this rank's rows."""
    p, backend = plan.p, registry.get(plan.backend)
    q, rows = tensors[0], (p.B, p.H, p.M)
    out = empty_out(q, p.E, p.dtype)  # pieces are all rows: each number is written
    lse, stats = (q.new_empty(shape, dtype=p.acc_dtype) for shape in (rows, (*rows, 2)))
    # A mean is a sum over steps, which is rounded once.
    wide = p.acc_dtype if p.weights == "mean" else p.dtype
    weights = q.new_zeros(p.weights_shape(), dtype=wide)
    for heads, of_heads, own in _gathered(plan, tensors):
        for cut, whole_rows in plan.pieces(of_heads):
            found = backend.forward(
                blocks.block_of(whole_rows, cut), *blocks.tensors_of(of_heads, cut, *own)
            )
            at = heads._replace(i=cut.i)
            for whole, part in zip((out, lse, stats), (found[0], found[1], found[3]), strict=True):
                blocks.rows_of(whole, at).copy_(part)
            if p.weights == "full":
                blocks.rows_of(weights, at).copy_(found[2])
            elif p.weights == "mean":
                share = found[2].to(p.acc_dtype) * (of_heads.H / p.H)
                weights[:, slice(*cut.i)] += share
    return out, lse, weights.to(p.dtype), stats


def backward(
    plan: Plan, tensors: tuple, found: tuple, grads: tuple, bias_needs_grad: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of (q, k, v, w, bias).

    ``found``: out, None and stats. ``grads``: of out, lse and weights.
    """
    p, backend = plan.p, registry.get(plan.backend)
    q, k, v, w, bias = tensors
    (out, _, stats), (grad_out, grad_lse, grad_weights) = found, grads
    saved = out, stats, grad_out, grad_lse

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=p.acc_dtype, device=p.device)

    of_points = [torch.zeros_like(x) for x in (q, k, v)]  # each number is made once
    grad_w = None if w is None else zeros(p.B, p.H, p.D)
    grad_bias = zeros(*bias.shape) if bias_needs_grad else None
    for heads, of_heads, own in _gathered(plan, tensors):
        grad_q, *mine = blocks.tensors_of(p, heads, *of_points, grad_w, grad_bias)
        sums = grad_q, *(zeros(*x.shape) for x in own[1:3]), *mine[2:]
        for cut, whole_rows in plan.pieces(of_heads):
            block = dataclasses.replace(blocks.block_of(whole_rows, cut), wide=True)
            at = heads._replace(i=cut.i)
            rows = (None if x is None else blocks.rows_of(x, at) for x in saved)
            parts = backend.backward(
                block, *blocks.tensors_of(of_heads, cut, *own), *rows,
                _share(p, of_heads, grad_weights, at), grad_bias is not None,
            )  # fmt: skip
            totals = blocks.tensors_of(of_heads, cut, *sums)
            for total, part in zip(totals, parts[:5], strict=True):
                if total is not None and part is not None:
                    total += part
        for to, whole in zip(mine[:2], sums[1:3], strict=True):
            to.copy_(comm.scatter_sum(whole, plan.keys, plan.group))
    return *of_points, *grads_beside(w, grad_w, bias, grad_bias)


def _share(p: Problem, of_heads: Problem, grad_weights: Tensor | None, at: Cut) -> Tensor | None:
    """The gradient of the weights of some rows and heads."""
    if grad_weights is None:
        return None
    if p.weights == "full":
        return blocks.rows_of(grad_weights, at)
    return grad_weights[:, slice(*at.i)] * (of_heads.H / p.H)


def grads_beside(w: Any, grad_w: Any, bias: Any, grad_bias: Any) -> tuple:
    """The gradients of w and of the bias, in their shapes and dtypes."""
    if grad_w is not None:
        grad_w = grad_w.sum(0).to(w.dtype)
    return grad_w, None if grad_bias is None else grad_bias.to(bias.dtype)
