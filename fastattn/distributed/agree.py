"""What ranks tell each other before they compute, so that all do the same, or all raise."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fastattn.distributed import comm
from fastattn.distributed.comm import Group
from fastattn.distributed.layout import Layout, constant
from fastattn.problem import Mask, arguments
from fastattn.problem.mask import MASK_TENSORS
from fastattn.problem.validate import DTYPES

Rows = tuple[str, ...]  # names of options
Function = TypeVar("Function", bound=Callable)


# What is the same on every rank, beside the lengths: see _shape.
ALIKE = (
    "samples", "heads of query", "heads of key", "heads of value", "last dim of query",
    "last dim of value", "dtype",
)  # fmt: skip
# And whether these are given.
OPTIONAL = ("weight", "sink", "attn_mask", "bias", *(f"mask.{name}" for name in MASK_TENSORS))


def whole(function: Function) -> Function:
    """The function, of which a compiler gets all or nothing.

    After a graph break or an error, torch.compile lets Python run a function and compiles what that
    calls. The parts would not agree on whether ranks tell each other their lengths.
    """

    @functools.cache
    def uncompiled() -> Callable:
        return torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or "torch._dynamo" not in sys.modules:
            return function(*args)
        return uncompiled()(*args)

    return cast(Function, call)


def every(own: Callable[[], Sequence[int]], count: int, group: Group) -> list[list[int]]:
    """The ``count`` numbers that ``own`` gives on each rank. If it raises on one, all ranks raise.

    Waits for the device. Compiled calls cannot: they take this rank's numbers for those of all.
    """
    if torch.compiler.is_compiling():
        return [list(own())] * group.size
    error = None
    try:
        numbers = [*own(), 0]
    except Exception as found:
        numbers, error = [0] * count + [1], found
    told = comm.lengths(numbers, group)
    if error is not None:
        raise error
    for rank, (*_, failed) in enumerate(told):
        if failed:
            raise ValueError(f"rank {rank} refuses its arguments, and says why")
    return [of_rank for *of_rank, _ in told]


def lengths(
    own: Callable[[], Sequence[int]], alike: Sequence[str], asks: bool, group: Group
) -> tuple[list[int], list[int]]:
    """How many rows and keys each rank has: the first two numbers of ``own``, which may raise.

    The other numbers, named by ``alike``, must be the same on every rank; if not, all ranks raise.
    Without ``asks``, and in compiled calls, a rank's own numbers stand for those of all.
    """
    if asks and not torch.compiler.is_compiling():
        told = every(own, 2 + len(alike), group)
        for rank, numbers in enumerate(told):
            for name, a, b in zip(alike, told[0][2:], numbers[2:], strict=True):
                if a != b:
                    first, other = (DTYPES[n] if name == "dtype" else n for n in (a, b))
                    raise ValueError(
                        f"{name}: expected the same on every rank, got {first} on rank 0 and "
                        f"{other} on rank {rank}"
                    )
    else:
        told = [own()] * group.size
    rows, keys = ([constant(of_rank[n]) for of_rank in told] for n in range(2))
    return rows, keys


def layouts(
    points: Sequence[Any],
    layout: Layout | None,
    key_layout: Layout | None,
    group: Group,
    named: dict[str, Any],
    check: Callable[[], Any],
) -> tuple[Layout, Layout]:
    """Of the queries and of the keys, after a check of query, key and value.

    ``named``: what the call is given beside them.
    """

    def own() -> list[int]:
        check()
        has = (named.get(name) is not None for name in OPTIONAL)
        return [points[0].shape[-2], points[1].shape[-2], *_shape(*points), *has]

    asks = layout is None and not torch.compiler.is_compiling()
    alike = *ALIKE, *(f"{name} is given" for name in OPTIONAL)
    rows, keys = lengths(own, alike, asks, group)
    known = range(group.size) if asks else (group.rank,)
    if layout is None:
        layout, key_layout = in_order(rows), key_layout or in_order(keys)
    key_layout = key_layout or layout
    for name, given, argument, has in (
        ("layout", layout, "query", rows),
        ("key_layout", key_layout, "key", keys),
    ):
        if not isinstance(given, Layout):
            raise TypeError(f"{name}: expected a Layout, got {type(given).__name__}")
        if given.ranks != group.size:
            raise ValueError(
                f"{name}: expected one for {group.size} ranks, as the mesh has, got one for "
                f"{given.ranks}"
            )
        for rank in known:
            if given.sizes[rank] != has[rank]:
                hint = ": cross-attention takes key_layout=" if name == "key_layout" else ""
                raise ValueError(
                    f"{argument}: expected {given.sizes[rank]} rows on rank {rank}, as {name} "
                    f"says, got {has[rank]}{hint}"
                )
    return layout, key_layout


def _shape(query: Tensor, key: Tensor, value: Tensor) -> list[int]:
    """What ``ALIKE`` names."""
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value)]
    samples = math.prod(torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value))))
    return [samples, *heads, query.shape[-1], value.shape[-1], DTYPES.index(query.dtype)]


def by_name(options: dict[str, Any], **tensors: Any) -> dict[str, Any]:
    """The tensors of a call, its options, and what its mask has."""
    mask = options.get("mask")
    masks = MASK_TENSORS if isinstance(mask, Mask) else ()
    return tensors | options | {f"mask.{n}": getattr(mask, n) for n in masks}


def dtensor_of(named: dict[str, Any]) -> str | None:
    """The name of a DTensor among them, if any."""
    return next((name for name, x in named.items() if arguments.is_dtensor(x)), None)


def in_order(sizes: Iterable[int]) -> Layout:
    """Ranks that hold so many positions each, one after the other."""
    pieces, end = [], 0
    for size in sizes:
        pieces.append(((end, end + size),))
        end += size
    return Layout(end, tuple(pieces))


def _dense(options: dict[str, Any]) -> dict[str, Tensor]:
    """The masks and biases that may have rows, by option."""
    mask = options.get("mask")
    given = {name: options.get(name) for name in ("attn_mask", "bias")}
    given["keep"] = mask.keep if isinstance(mask, Mask) else None
    return {name: x for name, x in given.items() if isinstance(x, Tensor) and x.dim() > 1}


def rows_of(options: dict[str, Any]) -> Rows:
    """The masks and biases that do not broadcast over rows."""
    return tuple(name for name, x in _dense(options).items() if x.shape[-2] != 1)


def with_rows(options: dict[str, Any], layout: Layout, group: Group) -> Rows:
    """The masks and biases with rows, where each rank holds its own. The same on all ranks.

    Raises:
        ValueError: no rank can tell.
    """
    given, rows = _dense(options), rows_of(options)

    def one_query() -> tuple[()]:
        for name in rows:
            raise ValueError(
                f"{name}: of one query it is the same on every rank, [..., 1, N], got "
                f"{list(given[name].shape)}"
            )
        return ()

    if given and layout.length == 1:
        every(one_query, 0, group)
    if not given or layout.length == 1 or 1 not in layout.sizes:
        return rows
    if set(layout.sizes) == {1} or torch.compiler.is_compiling():
        raise ValueError(
            f"{next(iter(given))}: a rank has one row, which looks like one for all, and no other "
            "rank can tell: write another layout"
        )
    told = every(lambda: [name in rows for name in given], len(given), group)
    return tuple(name for name, has in zip(given, zip(*told, strict=True), strict=True) if any(has))
