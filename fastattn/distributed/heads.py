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
from torch.autograd import forward_ad

from fastattn import autograd
from fastattn.distributed import comm
from fastattn.distributed.comm import Group
from fastattn.distributed.layout import Layout
from fastattn.distributed.plan import Plan
from fastattn.problem import Origin, Problem, arguments
from fastattn.problem.mask import LIMITS
from fastattn.problem.record import returned

Heads = list[tuple[int, int]]  # of each rank


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


Ways = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]  # there, and back


class Move(torch.autograd.Function):
    """Linear functions between ranks, one a tensor. Gradients go through their transposes.

    Gradients move together, because ranks wait for each other: with zeros for what a rank does not
    need.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        # One parameter: dynamo drops ctx where a call has one argument more than there are names.
        ctx, ways, *tensors = args
        ctx.ways = ways
        moved = [there(x) for (there, _), x in zip(ways, tensors, strict=True)]
        return returned(*moved)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        refuse_transforms(*grads)
        back: Any = Move.apply([(back, there) for there, back in ctx.ways], *grads)
        return None, *back


def move(x: Tensor, there: Callable, back: Callable) -> Any:
    """A tensor elsewhere. Functions that knew tensors would keep them until backward."""
    refuse_transforms(x)
    (moved,) = Move.apply([(there, back)], x)  # pyright: ignore[reportGeneralTypeIssues]
    return moved


def refuse_transforms(*tensors: Any) -> None:
    """Raises NotImplementedError inside transforms of torch.func, for tangents and for batches."""
    if torch.compiler.is_compiling():
        return
    found = [x for x in tensors if isinstance(x, Tensor)]
    duals = found if forward_ad._current_level >= 0 else ()
    tangents = (forward_ad.unpack_dual(x).tangent for x in duals)
    unreachable = (
        torch._C._are_functorch_transforms_active()
        or any(x is not None for x in tangents)
        or any(map(arguments.is_legacy_batch, found))
    )
    if unreachable:
        raise NotImplementedError(
            "torch.func, forward mode and is_grads_batched do not reach other ranks: write "
            "torch.autograd.grad or backward() for one gradient at a time, and method='heads' for "
            "second derivatives"
        )


def same(x: Tensor) -> Tensor:
    """The tensor: for what moves in one direction only."""
    return x.view_as(x)


def replicated(x: Tensor | None, *groups: Group) -> Any:
    """The same tensor on every rank: its gradient is a sum over ranks, in float32 at least."""

    def summed(grad: Tensor) -> Tensor:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        for group in groups:
            wide = comm.total(wide, group)
        return wide.to(grad.dtype)

    if not isinstance(x, Tensor) or not x.requires_grad or not groups:
        return x
    return move(x, same, summed)


def to_heads(x: Tensor, layout: Layout, heads: Heads, group: Group) -> Any:
    """Rows of all heads to heads of all rows, dims 1 and 2; with a gradient."""
    rows, there = _ways(layout, heads, x.shape[1], group)
    return move(x, there, rows)


def _ways(layout: Layout, heads: Heads, H: int, group: Group) -> Ways:
    """To rows of all H heads, and to heads of all rows."""

    def to_heads(x: Tensor) -> Tensor:
        a, b = heads[group.rank]
        shapes = [(x.shape[0], b - a, n, *x.shape[3:]) for n in layout.sizes]
        return layout.join(comm.exchange([x[:, a:b] for a, b in heads], shapes, group), 2)

    return lambda x: _to_rows(x, layout, heads, H, group), to_heads


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


def whole_and_part(layout: Layout, dim: int, group: Group) -> Ways:
    """To the whole of a dim, the same on every rank, and to this rank's part of it."""
    return (
        lambda x: comm.gather_rows(x, layout, group, dim),
        lambda x: layout.take(x, dim, group.rank),
    )


# ---- attention ----


def attend(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights) of this rank's rows."""
    p, rows, group = plan.p, plan.layout, plan.group
    queries, keys = heads_of_ranks(p.H, p.Hkv, group.size)
    own = queries[group.rank]
    to_all: Ways = (  # the rows of all ranks, dim 2; back, this rank's rows of the sum over ranks
        lambda x: comm.gather_rows(x, rows, group),
        lambda x: comm.scatter_sum(x, rows, group),
    )

    def operand(name: str, x: Tensor) -> Tensor:  # [B|1, H|1, M|1, N|1]
        if name not in plan.rows:
            return x if x.shape[1] == 1 else x[:, slice(*own)]
        return move(x, *to_all) if x.shape[1] == 1 else to_heads(x, rows, queries, group)

    if bias is not None:
        bias = operand("bias", bias)
    if w is not None:
        w = w[..., slice(*own), :]
    if sink is not None:
        sink = sink[slice(*own)]
    mine = _problem(plan, own, keys[group.rank], operand)
    q = to_heads(q, rows, queries, group)
    k, v = (to_heads(x, plan.keys, keys, group) for x in (k, v))
    out, lse, weights = autograd.attend(plan.backend, mine, q, k, v, w, bias, sink)
    ways = _ways(rows, queries, p.H, group)
    moves: dict[str, tuple[Tensor, Ways]] = {"out": (out, ways)}
    if plan.lse:
        moves["lse"] = lse, ways
    if p.weights == "full":
        moves["weights"] = weights, ways
    if p.weights == "mean":
        share = weights[:, None].to(p.acc_dtype) * ((own[1] - own[0]) / p.H)  # rounded once
        moves["weights"] = share, (to_all[1], to_all[0])
    tensors, of_tensors = zip(*moves.values(), strict=True)
    found: Any = Move.apply(list(of_tensors), *tensors)
    moved = dict(zip(moves, found, strict=True))
    if p.weights == "mean":
        moved["weights"] = moved["weights"][:, 0].to(p.dtype)
    return moved["out"], moved.get("lse", lse), moved.get("weights", weights)


def _problem(plan: Plan, own: tuple[int, int], keys: tuple[int, int], operand: Callable) -> Problem:
    p, rows, group = plan.p, plan.layout, plan.group

    def limit(x: Any) -> Any:  # [B|1, M|1]
        if x is None or (x.shape[1] == 1 and 1 not in rows.sizes):
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
