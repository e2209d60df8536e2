"""Jagged nested tensors ``[B, H, j, D]``: their values ``[H, T, D]`` are packed documents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.problem import intervals
from fastattn.problem.mask import Mask

INSTEAD = "fastattn.varlen_attention over x.transpose(1, 2).values() and x.offsets()"


def given(query: object, key: object, value: object) -> bool:
    """Whether all three are jagged nested tensors."""
    return all(isinstance(x, Tensor) and x.layout is torch.jagged for x in (query, key, value))


def packed(
    query: Any, key: Any, value: Any, options: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor, Tensor, None], dict[str, Any]]:
    """The call over one sample of packed documents: ``[1, H, T, D]`` tensors, and its options.

    Raises:
        ValueError: another layout than ``[B, H, j, D]``, lengths that do not fit each other, or an
            option that would need a tensor of other lengths.
    """
    _check(query, key, value)
    for name in ("attn_mask", "mask", "bias", "return_weights"):
        if options.get(name) is not None:
            raise ValueError(f"{name}: jagged nested tensors take none: call {INSTEAD}")
    q, k, v = (x.values()[None] for x in (query, key, value))
    causal = "top_left" if options.get("is_causal", False) else False
    begin, end = intervals.documents(query.offsets(), key.offsets(), q.shape[2], causal, None)
    mask = Mask(kv_begin=begin, kv_len=end)
    return (q, k, v, None), {**options, "mask": mask, "is_causal": False}


def restored(results: Tensor | tuple[Tensor, ...], query: Any) -> Any:
    """Results ``[1, H, T, ...]`` as jagged nested tensors with the offsets of query."""
    if isinstance(results, tuple):
        return tuple(restored(x, query) for x in results)
    return torch.nested.nested_tensor_from_jagged(results[0], query.offsets(), jagged_dim=2)


def _check(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4 or x._ragged_idx != 2:
            shape = str(list(x.shape))
            raise ValueError(
                f"{name}: expected [B, H, j, D], jagged in dim 2, got {shape}: "
                "write x.unflatten(-1, (H, D)).transpose(1, 2) for [B, j, H * D]"
            )
        if x.lengths() is not None:
            raise ValueError(
                f"{name}: expected no gaps between sequences: write {name}.contiguous()"
            )
    if key.shape[2] != value.shape[2]:
        raise ValueError(
            "key and value: expected the same offsets: make one of them by "
            "torch.nested.nested_tensor_from_jagged(values, other.offsets())"
        )
    if query.shape[0] != key.shape[0]:
        raise ValueError(
            f"query and key: expected as many sequences, got {query.shape[0]} and {key.shape[0]}"
        )
