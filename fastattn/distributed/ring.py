"""Method "ring": keys and values go round, and each rank attends to those that it has just now.

    step s: keys of rank (r - s) % P;     next ones are on their way meanwhile
    merge:  blocks of keys, in float32: fastattn/blocks.py

Backward sends keys round again, and dK, dV one step behind them. Those of a rank's own keys stay at
home. Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
Context", 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastattn import blocks
from fastattn.backends import registry
from fastattn.blocks import Cut, Part
from fastattn.distributed import comm
from fastattn.distributed.gather import grads_beside
from fastattn.distributed.plan import Plan
from fastattn.problem.record import empty_out


def check(plan: Plan) -> None:
    """Raises ValueError for a problem that this method cannot compute.

    Mean weights cannot be rescaled by blocks. With dropout, pieces of the layout of keys must begin
    at multiples of 4.
    """
    p = plan.p
    if p.weights == "mean":
        raise ValueError(
            "return_weights='mean': method 'ring' cannot rescale a mean over heads: write "
            "method='gather', or 'full'"
        )
    if p.dropout is not None and any(a % 4 for own in plan.keys.pieces for a, b in own if a < b):
        raise ValueError(
            "dropout_p: method 'ring' takes pieces of keys that begin at multiples of 4: write "
            "Layout.zigzag(..., unit=4), or method='gather'"
        )


# ---- what goes round ----


def _pass_on(plan: Plan, tensors: list[Tensor], step: int) -> Any:
    """Sends what is here at a step to the next rank; returns a function that waits for the rest."""
    group, sizes = plan.group, plan.keys.sizes
    ranks, source = range(group.size), (group.rank - step - 1) % group.size
    nothing = [0]
    coming = [[*x.shape[:2], sizes[source], x.shape[3]] for x in tensors]
    flat = torch.cat([x.reshape(-1) for x in tensors])
    parts = [flat if r == (group.rank + 1) % group.size else flat[:0] for r in ranks]
    total = sum(torch.Size(shape).numel() for shape in coming)
    shapes = [[total] if r == (group.rank - 1) % group.size else nothing for r in ranks]
    ready = comm.exchange_later(parts, shapes, group)

    def wait() -> list[Tensor]:
        found = ready()[(group.rank - 1) % group.size]
        pieces = found.split([torch.Size(shape).numel() for shape in coming])
        return [x.view(shape) for x, shape in zip(pieces, coming, strict=True)]

    return wait


def _round(plan: Plan, k: Tensor, v: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(step, rank whose keys these are, keys, values), the next ones on their way."""
    P, held = plan.group.size, [k, v]
    for step in range(P):
        following = _pass_on(plan, held, step) if step < P - 1 else None
        yield step, (plan.group.rank - step) % P, held[0], held[1]
        if following is not None:
            held = following()


def _tiles(plan: Plan, source: int, q: Tensor, k: Tensor, v: Tensor, w: Any, bias: Any) -> Iterator:
    """(pairs of the record, pairs of what is here, problem, tensors) that the band leaves."""
    for rows, whole in plan.pieces(plan.p):
        for at, begin, size in plan.keys.of(source):
            cut = rows._replace(j=(begin, begin + size))
            block = blocks.block_of(whole, cut)
            if blocks.keeps_nothing(block):
                continue
            here = rows._replace(j=(at, at + size))
            own = blocks.tensors_of(plan.p, here, q, k, v, w, None)[:4]
            of_bias = None if bias is None else blocks.operand_of(bias, cut)
            yield cut, here, block, (*own, of_bias)


# ---- the passes ----


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, w: Any, bias: Any) -> tuple[Tensor, ...]:
    """(out, lse, weights, stats) of this rank's rows."""
    p, backend = plan.p, registry.get(plan.backend)
    parts: dict[tuple, list[tuple[Cut, Part]]] = {}
    for _, source, keys, values in _round(plan, k, v):
        for cut, _, block, own in _tiles(plan, source, q, keys, values, w, bias):
            wide = dataclasses.replace(block, wide=True)
            parts.setdefault(cut.i, []).append((cut, Part(*backend.forward(wide, *own))))
    unit, rows = backend.shift_unit(p, bias is not None), (p.B, p.H, p.M)
    out = empty_out(q, p.E, p.dtype).zero_()
    lse = q.new_full(rows, -torch.inf, dtype=p.acc_dtype)
    stats = q.new_zeros((*rows, 2), dtype=p.acc_dtype)
    weights = q.new_zeros(p.weights_shape())
    for found in parts.values():
        merged, shares = blocks.merge(unit, [part for _, part in found])
        for whole, part in ((out, merged.out), (lse, merged.lse), (stats, merged.stats)):
            blocks.rows_of(whole, found[0][0]).copy_(part)
        for (cut, part), share in zip(found, shares, strict=True):
            if p.weights == "full":
                blocks.pairs_of(weights, cut).copy_(part.weights * share[..., None])
    return out, lse, weights, stats


def backward(
    plan: Plan, tensors: tuple, found: tuple, grads: tuple, bias_needs_grad: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of (q, k, v, w, bias).

    ``found``: out, the weights if they have a gradient, and stats. ``grads``: of out, lse and
    weights.
    """
    p, backend = plan.p, registry.get(plan.backend)
    q, k, v, w, bias = tensors
    (out, weights, stats), (grad_out, grad_lse, grad_weights) = found, grads
    saved = out, stats, grad_out, grad_lse

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=p.acc_dtype, device=p.device)

    grad_q = zeros(*q.shape)
    grad_w = None if w is None else zeros(p.B, p.H, p.D)
    grad_bias = zeros(*bias.shape) if bias_needs_grad else None
    home: list[Tensor] = []
    travelling: list[Tensor] = []
    for step, source, keys, values in _round(plan, k, v):
        sums = [zeros(*keys.shape), zeros(*values.shape)]
        for cut, here, block, own in _tiles(plan, source, q, keys, values, w, bias):
            rows = [None if x is None else blocks.rows_of(x, cut) for x in saved]
            own_weights = None
            if grad_weights is not None:
                pair = (blocks.rows_of(x, cut) for x in (weights, grad_weights))
                rows[3] = blocks.grad_lse_of(cut, rows[3], *pair)
                own_weights = blocks.pairs_of(grad_weights, cut)
            parts = backend.backward(
                dataclasses.replace(block, wide=True), *own, *rows, own_weights,
                grad_bias is not None,
            )  # fmt: skip
            totals = blocks.tensors_of(p, here, grad_q, *sums, grad_w, None)
            of_bias = None if grad_bias is None else blocks.operand_of(grad_bias, cut)
            for total, part in zip((*totals[:4], of_bias), parts[:5], strict=True):
                if total is not None and part is not None:
                    total += part
        if step == 0:
            home = sums
        else:
            travelling = _pass_on(plan, _added(sums, travelling), step)()
    points = zip((grad_q, *_added(home, travelling)), (q, k, v), strict=True)
    return *(grad.to(x.dtype) for grad, x in points), *grads_beside(w, grad_w, bias, grad_bias)


def _added(some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Sums of two lists; the first alone if there is no second."""
    return [x + y for x, y in zip(some, others, strict=True)] if others else some
