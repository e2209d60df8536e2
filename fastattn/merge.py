"""Attention over many keys, from its parts over some of the keys each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.problem import arguments


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Attention over disjoint sets of keys, from the results over each set.

    ``lse = log sum_p exp(lse_p)`` and ``out = sum_p exp(lse_p - lse) out_p`` over the parts p. Keys
    that many queries share, such as a common prompt, are then attended to once for all of them.

    Args:
        outs: outputs ``[..., M, E]``, one for each set of keys, all of one shape, dtype and device.
        lses: the log-sum-exps ``[..., M]`` that came with them (``return_lse=True``). -inf says
            that a part has no key for a row. That part's output is then not read.

    Returns:
        ``(out, lse)``: ``[..., M, E]`` in the dtype of outs, and ``[..., M]`` in that of lses. A
        row without keys in any part has output 0 and log-sum-exp -inf. Both are differentiable, and
        may be parts of another merge.

    Raises:
        TypeError: not a sequence of tensors, a dtype that is not floating point, or DTensors beside
            plain tensors.
        ValueError: no parts, or shapes, dtypes or devices that do not fit.

    Numerics: sums are in float32, in float64 for float64 outputs. The largest part of a row decides
    the scale, so nothing overflows.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    Example:
        >>> q, k0, k1 = (torch.randn(2, 4, n, 8) for n in (3, 100, 7))
        >>> v0, v1 = k0, k1
        >>> prompt = fastattn.scaled_dot_product_attention(q, k0, v0, return_lse=True)
        >>> rest = fastattn.scaled_dot_product_attention(q, k1, v1, return_lse=True)
        >>> out, lse = fastattn.merge_attention(*zip(prompt, rest))
    """
    _check(outs, lses)
    dtype = torch.promote_types(outs[0].dtype, torch.float32)
    logs = torch.stack([lse.to(dtype) for lse in lses])
    absent = logs == -torch.inf
    top = logs.detach().amax(0)
    top = top.masked_fill(top == -torch.inf, 0.0)
    shares = torch.exp(logs - top)
    total = shares.sum(0)
    empty = absent.all(0)
    total = total.masked_fill(empty, 1.0)
    out = sum(
        (share / total)[..., None] * part.to(dtype).masked_fill(gone[..., None], 0.0)
        for share, part, gone in zip(shares, outs, absent, strict=True)
    )
    assert isinstance(out, Tensor)
    lse = (top + torch.log(total)).masked_fill(empty, -torch.inf)
    return out.to(outs[0].dtype), lse.to(lses[0].dtype)


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    _check_sequence("outs", outs)
    _check_sequence("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"outs, lses: expected one of each for every part, got {len(outs)} and {len(lses)}"
        )
    if len({*map(arguments.is_dtensor, (*outs, *lses))}) > 1:
        raise TypeError(
            "outs, lses: expected either DTensors or plain tensors, got both: write "
            "x.full_tensor() of the DTensors"
        )
    if lses[0].device != outs[0].device:
        raise ValueError(
            f"lses: expected the device of outs, {outs[0].device}, got {lses[0].device}"
        )
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.dim() == 0 or out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"outs[{n}], lses[{n}]: expected shapes [..., M, E] and [..., M], the same for all "
                f"parts, got {tuple(out.shape)} and {tuple(lse.shape)}; outs[0] has "
                f"{tuple(outs[0].shape)}"
            )


def _check_sequence(name: str, tensors: object) -> None:
    """Raises unless these are floating-point tensors of one dtype and on one device."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        got = type(tensors).__name__
        raise TypeError(f"{name}: expected a list or tuple of tensors, got {got}")
    for n, x in enumerate(tensors):
        if not isinstance(x, Tensor):
            raise arguments.no_tensor(f"{name}[{n}]", x)
        if not x.is_floating_point():
            raise TypeError(f"{name}[{n}]: expected a floating-point tensor, got {x.dtype}")
        if x.dtype != tensors[0].dtype or x.device != tensors[0].device:
            raise ValueError(
                f"{name}[{n}]: expected {tensors[0].dtype} on {tensors[0].device} like {name}[0], "
                f"got {x.dtype} on {x.device}"
            )
