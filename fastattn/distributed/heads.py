"""Method "heads": an all-to-all gives each rank some heads of all rows, and takes results back.

    q, k, v [B, H, n_r, D] of all ranks -> [B, h_r, N, D] -> attention -> [B, h_r, N, E] -> rows

Each head is computed as on one device, so results are the same bits. Every step is differentiable
on its own. Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import autograd
from fastattn.distributed import comm
from fastattn.distributed.comm import Group
from fastattn.distributed.layout import Layout
from fastattn.distributed.plan import Plan
from fastattn.problem import Origin, Problem
from fastattn.problem.record import MASK_TENSORS

Heads = list[tuple[int, int]]  # of each rank
LIMITS = [name for name in MASK_TENSORS if name != "keep"]  # of rows


def heads_of_ranks(H: int, Hkv: int, ranks: int) -> tuple[Heads, Heads]:
    """The query heads and the key heads of each rank.

    Whole groups while key heads suffice; else ranks that share a key head each get it.

    Raises:
        ValueError: more ranks than query heads, or a rank's heads would need two key heads.
    """
    if Hkv >= ranks:
        group = H // Hkv
        keys = [(r * Hkv // ranks, (r + 1) * Hkv // ranks) for r in range(ranks)]
        return [(a * group, b * group) for a, b in keys], keys
    queries = [(r * H // ranks, (r + 1) * H // ranks) for r in range(ranks)]
    group = H // max(Hkv, 1)
    if ranks > H or any(a // group != (b - 1) // group for a, b in queries):
        raise ValueError(
            f"method 'heads': {ranks} ranks cannot share {H} query heads and {Hkv} key heads: "
            "write method='gather'"
        )
    return queries, [(a // group, a // group + 1) for a, _ in queries]


class Move(torch.autograd.Function):
    """A linear function between ranks, whose gradient is another one, its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.functions = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        there, back = ctx.functions
        return Move.apply(grads[0], back, there), None, None  # pyright: ignore[reportReturnType]


def same(x: Tensor) -> Tensor:
    """The tensor: for what moves in one direction only."""
    return x.view_as(x)


def replicated(x: Tensor | None, *groups: Group) -> Any:
    """What every rank holds alike: its gradient is a sum over ranks, in float32 at least."""

    def summed(grad: Tensor) -> Tensor:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        for group in groups:
            wide = comm.total(wide, group)
        return wide.to(grad.dtype)

    grows = isinstance(x, Tensor) and x.requires_grad
    return Move.apply(x, same, summed) if grows and groups else x


def to_heads(x: Tensor, layout: Layout, heads: Heads, group: Group) -> Any:
    """Rows of all heads to heads of all rows, dims 1 and 2; with a gradient."""

    def there(x: Tensor) -> Tensor:
        a, b = heads[group.rank]
        shapes = [(x.shape[0], b - a, n, *x.shape[3:]) for n in layout.sizes]
        return layout.join(comm.exchange([x[:, a:b] for a, b in heads], shapes, group), 2)

    return Move.apply(x, there, lambda g: _to_rows(g, layout, heads, x.shape[1], group))


def _to_rows(x: Tensor, layout: Layout, heads: Heads, H: int, group: Group) -> Tensor:
    """The way back. Heads that several ranks hold, as gradients of key heads, add up in float32."""
    own = layout.sizes[group.rank]
    shapes = [(x.shape[0], b - a, own, *x.shape[3:]) for a, b in heads]
    parts = comm.exchange([layout.take(x, 2, r) for r in range(group.size)], shapes, group)
    wide = torch.promote_types(x.dtype, torch.float32)
    whole = x.new_zeros(x.shape[0], H, own, *x.shape[3:], dtype=wide)
    for (a, b), part in zip(heads, parts, strict=True):
        whole[:, a:b] += part
    return whole.to(x.dtype)


def to_rows(x: Tensor, layout: Layout, heads: Heads, H: int, group: Group) -> Any:
    """Heads of all rows to rows of all heads, with a gradient."""

    def back(x: Tensor) -> Tensor:
        a, b = heads[group.rank]
        shapes = [(x.shape[0], b - a, n, *x.shape[3:]) for n in layout.sizes]
        return layout.join(comm.exchange([x[:, a:b] for a, b in heads], shapes, group), 2)

    return Move.apply(x, lambda x: _to_rows(x, layout, heads, H, group), back)


def all_rows(x: Tensor, layout: Layout, group: Group) -> Any:
    """All rows on every rank, dim 2, with a gradient."""
    return Move.apply(
        x,
        lambda x: comm.gather_rows(x, layout, group),
        lambda grad: comm.scatter_sum(grad, layout, group),
    )


# ---- attention ----


def attend(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights) of this rank's rows."""
    p, rows, group = plan.p, plan.layout, plan.group
    queries, keys = heads_of_ranks(p.H, p.Hkv, group.size)
    own = queries[group.rank]

    def operand(name: str, x: Tensor) -> Tensor:  # [B|1, H|1, M|1, N|1]
        if name not in plan.rows:
            return x if x.shape[1] == 1 else x[:, slice(*own)]
        return all_rows(x, rows, group) if x.shape[1] == 1 else to_heads(x, rows, queries, group)

    if bias is not None:
        bias = operand("bias", bias)
    if w is not None:
        w = w[..., slice(*own), :]
    mine = _problem(plan, own, keys[group.rank], operand)
    q = to_heads(q, rows, queries, group)
    k, v = (to_heads(x, plan.keys, keys, group) for x in (k, v))
    out, lse, weights = autograd.attend(plan.backend, mine, q, k, v, w, bias)
    out = to_rows(out, rows, queries, p.H, group)
    lse = to_rows(lse, rows, queries, p.H, group)
    return out, lse, _own_weights(plan, weights, queries)


def _problem(plan: Plan, own: tuple[int, int], keys: tuple[int, int], operand: Callable) -> Problem:
    p, rows, group = plan.p, plan.layout, plan.group

    def limit(x: Any) -> Any:  # [B|1, M|1]
        if x is None or rows.length == 1 or (x.shape[1] == 1 and 1 not in rows.sizes):
            return x
        # One row's limit looks like one for all rows: both become limits of rows.
        return comm.gather_rows(x.expand(-1, p.M), rows, group, 1)

    own_masks = {name: limit(getattr(p.mask, name)) for name in LIMITS}
    if p.mask.keep is not None:
        own_masks["keep"] = operand("keep", p.mask.keep.to(torch.uint8)).bool()
    mask = dataclasses.replace(p.mask, **own_masks)
    return dataclasses.replace(
        p, M=rows.length, H=own[1] - own[0], Hkv=keys[1] - keys[0], mask=mask,
        origin=Origin(p.origin.b, p.origin.h + own[0]),
    )  # fmt: skip


def _own_weights(plan: Plan, weights: Tensor, heads: Heads) -> Any:
    p, rows, group = plan.p, plan.layout, plan.group
    if p.weights == "none":
        return weights
    if p.weights == "full":
        return to_rows(weights, rows, heads, p.H, group)
    a, b = heads[group.rank]
    share = weights[:, None].to(p.acc_dtype) * ((b - a) / p.H)  # a sum, which is rounded once
    summed: Any = Move.apply(
        share,
        lambda x: comm.scatter_sum(x, rows, group),
        lambda grad: comm.gather_rows(grad, rows, group),
    )
    return summed[:, 0].to(p.dtype)
