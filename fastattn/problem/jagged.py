"""Jagged nested tensors: sequences of different lengths. Their ``values()`` are packed documents.

``[B, H, j, D]`` has the values ``[H, T, D]``, and ``[B, j, D]`` the values ``[T, D]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastattn.problem import arguments, intervals, relative
from fastattn.problem.mask import Mask

NONE_OF = "attn_mask", "mask", "bias", "return_weights"


def is_jagged(x: object) -> bool:
    """Whether ``x`` is a jagged nested tensor."""
    return isinstance(x, Tensor) and x.layout is torch.jagged


def given(query: object, key: object, value: object) -> bool:
    """Whether all three are jagged nested tensors."""
    return is_jagged(query) and is_jagged(key) and is_jagged(value)


def call(
    function: Callable[..., Any], query: Any, key: Any, value: Any, options: dict[str, Any]
) -> Any:
    """``function`` of one sample of packed documents; its results are jagged again.

    Raises:
        ValueError: see :func:`packed`.
    """
    tensors, options = packed(query, key, value, options)
    return _restored(function(*tensors, **options), query)


def packed(
    query: Any, key: Any, value: Any, options: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Tensors ``[1, H, T, D]`` or ``[1, T, D]`` of packed documents, and the call's options.

    Raises:
        ValueError: another layout, lengths that do not fit each other, or an option that would need
            a tensor of other lengths.
    """
    if (reason := reason_against(query, key, value, options)) is not None:
        raise ValueError(reason)
    q, k, v = (x.values()[None] for x in (query, key, value))
    arguments.check_bool("is_causal", options.get("is_causal", False))
    causal = "top_left" if options.get("is_causal", False) else False
    mask = documents(query.offsets(), key.offsets(), q.shape[-2], causal)
    return (q, k, v), {**options, "mask": mask, "is_causal": False}


def documents(
    offsets: Tensor,
    offsets_k: Tensor,
    length: int,
    causal: str | bool,
    window: tuple[int, int] | None = None,
) -> Mask:
    """``mask_of`` these, which is remembered."""
    given = offsets, offsets_k
    return remembered(
        given, length, (causal,), window, lambda: mask_of(*given, length, causal, window)
    )


def mask_of(
    offsets: Tensor,
    offsets_k: Tensor,
    length: int,
    causal: str | bool,
    window: tuple[int, int] | None,
) -> Mask:
    """The mask by which each of ``length`` packed queries sees the keys of its own sequence."""
    begin, end = intervals.documents(offsets, offsets_k, length, causal, window)
    return Mask(kv_begin=begin, kv_len=end)


def _listed(offsets: Any) -> Any:
    """A list of ints as a tensor; all else as it is."""
    listed = type(offsets) in (list, tuple) and len(offsets) > 0
    if listed and all(type(n) is int and 0 <= n < 2**63 for n in offsets):
        return torch.tensor(offsets, device="cpu")
    return offsets


_MOST_MADE, _MOST_ROWS = 8, 1 << 16  # masks, and rows of one, 8 bytes each
# (a copy of the offsets, what else a mask was made of, the mask), the newest first.
_made: tuple[tuple[tuple[Tensor, ...], tuple, Mask], ...] = ()


def remembered(
    given: tuple[Any, Any], length: int, others: tuple, window: Any, make: Callable[[], Mask]
) -> Mask:
    """What ``make`` returns, or has returned for equal offsets: layers share their documents.

    To make a mask of offsets takes ten times as long as attention of few tokens. Offsets on a GPU
    are not compared, as that waits for it.
    """
    global _made
    offsets = tuple(map(_listed, given[:1] if given[0] is given[1] else given))
    ends = window if isinstance(window, tuple | list) else ()
    plain = window is None or (len(ends) == 2 and all(type(n) is int for n in ends))
    if not plain or not all(type(x) is Tensor and arguments.can_read(x) for x in offsets):
        return make()
    if length > _MOST_ROWS:  # such a mask takes a small part of the time, and much memory
        return make()
    others = (length, *others, *ends, *((x.dtype, x.shape) for x in offsets))
    for copies, besides, mask in _made:
        if besides == others and all(map(torch.equal, copies, offsets)):
            return mask
    with torch.inference_mode(False):  # autograd may save these later
        mask = make()
    copies = tuple(x.detach().clone() for x in offsets)
    _made = ((copies, others, mask), *_made[: _MOST_MADE - 1])
    return mask


def reason_against(query: Any, key: Any, value: Any, options: dict[str, Any]) -> str | None:
    """Why these jagged tensors cannot be packed; None if they can."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() not in (3, 4) or x._ragged_idx != x.dim() - 2:
            shape = str(list(x.shape))
            return (
                f"{name}: expected [B, H, j, D] or [B, j, D], jagged in dim -2, got {shape}: "
                "write x.unflatten(-1, (H, D)).transpose(1, 2) for [B, j, H * D]"
            )
    tensors = {"query": query, "key": key, "value": value}
    if (gaps := _gaps(tensors.items())) is not None:
        return gaps
    if not same_lengths(key, value):
        return (
            "key and value: expected the same offsets: make one of them by "
            "torch.nested.nested_tensor_from_jagged(x.values(), other.offsets(), "
            f"jagged_dim={key._ragged_idx})"
        )
    if query.shape[0] != key.shape[0]:
        return f"query and key: expected as many sequences, got {query.shape[0]} and {key.shape[0]}"
    for name in NONE_OF:
        if options.get(name) is not None and not _fits(name, options[name], query, key):
            values = "x.values()[:, None]" if query.dim() == 3 else "x.transpose(1, 2).values()"
            return (
                f"{name}: jagged nested tensors take none: call fastattn.varlen_attention over "
                f"{values} and x.offsets(), or pad and mask"
            )
    return None


def _fits(name: str, x: Any, query: Any, key: Any) -> bool:
    """Whether an option means the same of packed documents: distances, between equal lengths."""
    return name == "bias" and isinstance(x, relative.Relative) and same_lengths(query, key)


def check_whole(tensors: Iterable[tuple[str, Any]]) -> None:
    """Raises ValueError if there are gaps between the sequences of a tensor."""
    if (gaps := _gaps(tensors)) is not None:
        raise ValueError(gaps)


def _gaps(tensors: Iterable[tuple[str, Any]]) -> str | None:
    for name, x in tensors:
        if x.lengths() is not None:
            before = " before .transpose(1, 2)" if x.dim() == 4 else ""
            return f"{name}: expected no gaps between sequences: write .contiguous(){before}"
    return None


def same_lengths(x: Tensor, y: Tensor) -> bool:
    """Whether torch knows that the sequences of both have the same lengths."""
    return x.shape[x._ragged_idx] == y.shape[y._ragged_idx]  # pyright: ignore


def _restored(results: Tensor | tuple[Tensor, ...], query: Any) -> Any:
    """Results ``[1, H, T, ...]`` as jagged nested tensors with the offsets of query."""
    if isinstance(results, tuple):
        return tuple(_restored(x, query) for x in results)
    return from_values(results[0], query)


def from_values(values: Tensor, like: Any) -> Tensor:
    """The jagged tensor of these values, with the offsets and the jagged dim of ``like``."""
    return torch.nested.nested_tensor_from_jagged(
        values, like.offsets(), jagged_dim=like._ragged_idx
    )
