"""Attention over a sequence that the ranks of a mesh share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from fastattn import functional, sinks
from fastattn.backends import registry, watch
from fastattn.distributed import agree, comm, heads, operators
from fastattn.distributed.agree import Rows
from fastattn.distributed.comm import Group
from fastattn.distributed.heads import move
from fastattn.distributed.layout import Layout
from fastattn.distributed.plan import Plan
from fastattn.functional import Returned
from fastattn.problem import Dropout, Mask, Origin, Score, arguments, call_cache, relative, validate
from fastattn.problem.mask import LIMITS, MASK_TENSORS

if TYPE_CHECKING:
    from typing_extensions import Unpack

Method = Literal["heads", "gather", "ring"]
METHODS = ("heads", *operators.PASSES)


class ContextOptions(functional.Options, total=False):
    """Keywords that the overloads of ``context_parallel_attention`` share."""

    weight: Tensor | None
    method: Method | None
    layout: Layout | None
    key_layout: Layout | None
    heads_per_step: int | None
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, mesh: Any, *,
    return_weights: None = ..., return_lse: Literal[False] = ..., **options: Unpack[ContextOptions],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, mesh: Any, *,
    return_weights: Returned, return_lse: Literal[False] = ..., **options: Unpack[ContextOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, mesh: Any, *,
    return_weights: None = ..., return_lse: Literal[True], **options: Unpack[ContextOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, mesh: Any, *,
    return_weights: Returned, return_lse: Literal[True], **options: Unpack[ContextOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, mesh: Any, *,
    return_weights: Returned | None = ..., return_lse: bool = ...,
    **options: Unpack[ContextOptions],
) -> functional.Results: ...  # fmt: skip
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mesh: Any,
    *,
    weight: Tensor | None = None,
    method: Method | None = None,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    heads_per_step: int | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    backend: functional.Backend = "auto",
    **options: Any,
) -> functional.Results:
    r"""Attention over a sequence that the ranks of a mesh share: local rows in, local rows out.

    The result is this rank's rows of the result of one device. Masks, dropout's bits, weights and
    gradients are those of one device, too. A call that cannot be computed so raises an error.

    Every rank calls this with its own rows of query, key and value. A mask or bias that has rows
    holds this rank's rows. Its keys are all keys, in the order of positions. ``kv_len`` and
    ``kv_begin`` of shape ``[B]``, weight, sink, seed, and a bias that broadcasts over rows are the
    same on every rank. For a sequence of one query, so is every mask.

    Args:
        query: ``[..., H, M_r, D]``, the rows that the layout gives this rank.
        key: ``[..., Hkv, N_r, D]``, likewise.
        value: ``[..., Hkv, N_r, E]``.
        mesh: a 1-D :class:`torch.distributed.DeviceMesh`, or a process group.
        weight: of the additive score, ``[D]`` or ``[H, D]``. Default None: the scaled dot product.
        method: ``"heads"`` gives each rank some heads of all rows, and sends rows back.
            ``"gather"`` brings all keys to every rank, some heads at a time. ``"ring"`` passes keys
            around, which takes the least memory. Default None: heads if the key heads are a
            multiple of the ranks and no mask or bias has rows, else gather.
        layout: which positions each rank holds. Default None: the ranks tell each other, in their
            order, which waits for the device. Compiled calls take equal shares instead.
        key_layout: the same of the keys, for cross-attention. Default None: ``layout``.
        heads_per_step: how many key heads "gather" brings at a time. Default None: a quarter.
        sink: see :func:`fastattn.scaled_dot_product_attention`. Beside one,
            ``return_weights="mean"`` takes the memory of ``"full"`` with "gather".
        return_lse: see there.
        backend: see there.
        **options: attn_mask, dropout_p, is_causal, scale, enable_gqa, mask, bias, softcap,
            return_weights and seed, as there. Indices are those of the whole sequence.

    Returns:
        ``out`` ``[..., H, M_r, E]``, or ``(out[, weights][, lse])``: this rank's rows.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes that do not fit the layout, or a layout for another number of ranks. A
            mask or bias with one row on every rank: it may be one row for all. A method that cannot
            compute the problem: the error names one that can.
        NotImplementedError: inside torch.func's transforms, in forward mode, and in a backward pass
            with ``is_grads_batched``.
        RuntimeError: no process group; or a rank that did not come within the group's timeout.

    Numerics: "heads" and "gather" give the bits of one device where a kernel sums the same way;
    gradients of keys are sums over ranks, in float32. "ring" merges blocks in float32. Gradients of
    weight, sink, and a bias without rows are sums over ranks, the same on every rank. "heads" has
    second derivatives.

    Source: Jacobs et al., "DeepSpeed Ulysses", 2023 (heads); Llama Team, "The Llama 3 Herd of
    Models", 2024, section 3.3.2 (gather); Liu, Zaharia and Abbeel, "Ring Attention with Blockwise
    Transformers for Near-Infinite Context", 2023 (ring).

    Example:
        >>> layout = Layout.zigzag(1000, ranks=8)
        >>> own = shard(x, 2, layout, group)  # x: [1, 8, 1000, 64], the same on every rank
        >>> out = context_parallel_attention(own, own, own, group, layout=layout, is_causal=True)
    """
    arguments.check_choice("method", method, (None, *METHODS))
    return attend(
        "dot" if weight is None else "additive", (query, key, value, weight), Group(mesh), Origin(),
        (method, layout, key_layout, heads_per_step), sink, return_lse, backend, options,
    )  # fmt: skip


@agree.whole
def attend(
    score: Score,
    given: tuple[Any, ...],
    group: Group,
    origin: Origin,
    how: tuple[Method | None, Layout | None, Layout | None, int | None],
    sink: Tensor | None,
    return_lse: bool,
    backend: str,
    options: dict,
    rows: Rows | None = None,
) -> functional.Results:
    """The same of (query, key, value, weight) whose samples and heads begin at an origin.

    ``rows``: ``agree.rows_of`` the whole options, if the caller knows.
    """
    arguments.check_bool("return_lse", return_lse)
    if isinstance(options.get("bias"), relative.Relative):
        raise ValueError(
            "bias: expected a tensor, because the rows of a rank need not follow each other: write "
            "bias.to_dense(M, N) and shard its rows"
        )
    method, layout, key_layout, heads_per_step = how
    heads.refuse_transforms(*given, options.get("attn_mask"), options.get("bias"), sink)
    *points, weight = given
    if score == "additive" and options.get("scale") is not None:
        raise arguments.unknown_keywords("additive_attention", ["scale"])
    if arguments.is_causal_bias(options.get("attn_mask")):
        raise ValueError(
            "attn_mask: ranks have no diagonal of their own: write is_causal=True or "
            "mask=Mask(causal=...)"
        )
    tensors: Any = arguments.autocast(score, *points, heads.replicated(weight, group))
    asked_all = layout is None
    grouped = options.get("enable_gqa", False)

    own = dict(zip(("query", "key", "value", "weight"), given, strict=True))
    named = agree.by_name(options, **own, sink=sink)

    def check() -> object:
        if (name := agree.dtensor_of(named)) is not None:
            raise TypeError(
                f"{name}: expected a plain tensor, got a DTensor: write x.to_local() of what this "
                "rank holds, or scaled_dot_product_attention(), which takes DTensors"
            )
        return validate.build(score, *tensors, enable_gqa=grouped)

    layout, key_layout = agree.layouts(tensors[:3], layout, key_layout, group, named, check)
    if rows is None:
        rows = agree.with_rows(options, layout, group)
    options = options | {
        name: heads.replicated(x, group)  # their gradients are sums over ranks
        for name, x in options.items()
        if isinstance(x, Tensor) and name not in rows
    }
    inputs = _together(score, tensors, (layout, key_layout), options, sink, group, asked_all)
    p = dataclasses.replace(inputs.p, origin=origin)
    if p.dropout is not None and options.get("seed") is None:
        seed: Any = p.dropout.seed
        p = dataclasses.replace(p, dropout=Dropout(p.dropout.p, comm.first(seed, group)))
    if sink is not None:
        sink = heads.replicated(sink, group)
    if method is None:
        whole = p.Hkv > 0 and p.Hkv % group.size == 0
        method = "heads" if whole and not rows else "gather"
    # A sink counts when all keys have been merged, and weights are averaged over heads behind that.
    average = sink is not None and p.weights == "mean" and method != "heads"
    if average:
        p = dataclasses.replace(p, weights="full")
    # Sums over blocks are wide: the backend is asked about that.
    asked = dataclasses.replace(p, wide=method != "heads")
    name = registry.select(asked, backend, inputs.bias is not None)
    plan = Plan(
        p, name, layout, key_layout, group, _heads_per_step(heads_per_step, p.Hkv),
        return_lse, _of_record(rows, options),
    )  # fmt: skip
    watch.call(asked, plan.backend, inputs.bias is not None)

    def by_method(_name: str, _p: Any, *canonical: Any) -> tuple[Tensor, Tensor, Tensor]:
        if method == "heads":
            return heads.attend(plan, *canonical)
        return operators.attend(method, plan, *canonical)

    seen = call_cache.Known(p, plan.backend, inputs.has_head_dim, inputs.batch)
    local = inputs.q, *_canonical_keys(tensors, inputs, options), inputs.w
    return functional.run(seen, inputs.bias, local, return_lse, sink, average, by_method)


def alone(
    score: Score,
    given: tuple[Any, ...],
    origin: Origin,
    sink: Tensor | None,
    return_lse: bool,
    backend: str,
    options: dict,
) -> functional.Results:
    """Attention of (query, key, value, weight) that begin at an origin, on one rank."""
    tensors: Any = arguments.autocast(score, *given)
    inputs = validate.build(score, *tensors, **options)
    p = dataclasses.replace(inputs.p, origin=origin)
    watch.call(p, backend, inputs.bias is not None)
    chosen = registry.select(p, backend, inputs.bias is not None)
    seen = call_cache.Known(p, chosen, inputs.has_head_dim, inputs.batch)
    local = inputs.q, inputs.k, inputs.v, inputs.w
    return functional.run(seen, inputs.bias, local, return_lse, sink)


# ---- what the arguments say of the whole ----


def _of_record(rows: Rows, options: dict) -> Rows:
    """What of the record has rows: "bias", "keep"."""
    attn_mask = options.get("attn_mask")
    kind = "keep" if isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.bool else "bias"
    return tuple(kind if name == "attn_mask" else name for name in rows)


def _together(
    score: Score,
    tensors: list,
    layouts: tuple[Layout, Layout],
    options: dict,
    sink: Tensor | None,
    group: Group,
    asked_all: bool,
) -> validate.Inputs:
    """The record. Where what one rank gives may be wrong alone, all ranks raise.

    ``asked_all``: there was no layout, so that ranks have told each other their lengths, and which
    tensors they give.
    """
    layout, mask = layouts[0], options.get("mask")
    made = []

    def build() -> tuple[()]:
        made.append(_build(score, tensors, (layout.length, layouts[1].length), options))
        if sink is not None:
            sinks.check(sink, made[0].q)
        return ()

    of_mask = {n: getattr(mask, n) for n in MASK_TENSORS} if isinstance(mask, Mask) else {}
    given = sink, options.get("attn_mask"), options.get("bias"), *of_mask.values()
    limited = any(of_mask.get(n) is not None for n in LIMITS)
    # Values are read on CPUs alone. A shape that is wrong for all rows may be right for one row.
    asks = asked_all and any(x is not None for x in given)  # on every rank, or on none
    if asks or (limited and (tensors[0].device.type == "cpu" or 1 in layout.sizes)):
        agree.every(build, 0, group)
    else:
        build()
    return made[0]


def _build(score: Any, tensors: list, lengths: tuple[int, int], options: dict) -> validate.Inputs:
    """The record of this rank's rows and all keys. The values of other ranks' keys are not here."""
    query, key, value, weight = tensors
    M, N = lengths
    k, v = (x.new_empty(()).expand(*x.shape[:-2], N, x.shape[-1]) for x in (key, value))
    mask = options.get("mask")
    if M != 1 or not isinstance(mask, Mask):
        return validate.build(score, query, k, v, weight, **options)
    # The limits of one query are those of every rank, and most ranks do not have this row.
    others: Any = dataclasses.replace(mask, **dict.fromkeys(LIMITS))
    inputs = validate.build(score, query, k, v, weight, **options | {"mask": others})
    lead = validate.Lead(inputs.batch, inputs.has_head_dim, (inputs.p.H, 1, N))
    limits = {
        name: validate.check_limit(f"mask.{name}", lead, query, getattr(mask, name))
        for name in LIMITS
    }
    mask = dataclasses.replace(inputs.p.mask, **limits)
    return inputs._replace(p=dataclasses.replace(inputs.p, mask=mask))


def _canonical_keys(tensors: list, inputs: validate.Inputs, options: dict) -> tuple[Tensor, Tensor]:
    """This rank's keys and values, [B, Hkv, N_r, D|E]."""
    query, key, value, weight = tensors
    _, q, k, v = validate.to_4d(query, key, value, inputs.has_head_dim)
    grouped = options.get("enable_gqa", False) or weight is not None
    return validate.match_heads(q, k, v, grouped)[1:]


def _heads_per_step(given: int | None, Hkv: int) -> int:
    if given is None:
        return max(1, -(-Hkv // 4))
    return arguments.check_int("heads_per_step", given, 1)


# ---- inputs and outputs ----


def shard(x: Tensor, dim: int, layout: Layout, mesh: Any) -> Tensor:
    """This rank's positions of a tensor that every rank holds whole: inputs, labels.

    Args:
        x: any tensor with ``layout.length`` entries in a dim.
        dim: that dim.
        layout: which positions each rank holds.
        mesh: as in :func:`context_parallel_attention`.

    Returns:
        The rank's part, in the order of ``layout.positions(rank)``. The gradient of x is whole, on
        every rank.

    Raises:
        TypeError: ``layout`` is no :class:`Layout`, or x no plain tensor.
        ValueError: the dim has another size, or the layout is for another number of ranks.
        RuntimeError: no process group.
    """
    group = _matching(x, dim, layout, mesh, whole=True)
    gather, take = heads.whole_and_part(layout, dim, group)
    return move(x, take, gather)


def unshard(x: Tensor, dim: int, layout: Layout, mesh: Any) -> Tensor:
    """The whole tensor on every rank, in the order of positions: the inverse of :func:`shard`.

    All ranks must compute the same with the result, so that its gradient is the same on every rank.
    The gradient of x is this rank's part of it.

    Raises:
        TypeError: ``layout`` is no :class:`Layout`, or x no plain tensor.
        ValueError: the dim does not have as many entries as the layout gives this rank.
        RuntimeError: no process group.
    """
    group = _matching(x, dim, layout, mesh, whole=False)
    return move(x, *heads.whole_and_part(layout, dim, group))


def _matching(x: Tensor, dim: int, layout: Any, mesh: Any, whole: bool) -> Group:
    """The group of a tensor that is whole, or this rank's part, after a check of both."""
    if not isinstance(layout, Layout):
        raise TypeError(
            f"layout: expected a Layout, got {type(layout).__name__}: write "
            "Layout.contiguous(length, ranks)"
        )
    if not isinstance(x, Tensor) or arguments.is_dtensor(x):
        raise TypeError(
            f"x: expected a plain tensor, got {type(x).__name__}: write x.full_tensor() of a "
            "DTensor, and each tensor of a Mask by itself"
        )
    arguments.check_int("dim", dim, -x.dim())
    group = Group(mesh)
    if layout.ranks != group.size:
        raise ValueError(f"layout: expected one for {group.size} ranks, got {layout.ranks}")
    size = layout.length if whole else layout.sizes[group.rank]
    if dim >= x.dim() or x.shape[dim] != size:
        raise ValueError(f"x: expected {size} entries in dim {dim}, got {list(x.shape)}")
    return group
