"""The intervals of keys behind the masks that have a name: documents, segments, prefixes.

Everything is computed on the device of the given tensors. Nothing waits for a GPU, but for the
number of packed queries where nobody gives it. Results are int32 ``[B or 1, M]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.problem import arguments

Integers = Tensor | Sequence[Any]
Window = tuple[int, int] | None


def offsets_of(
    cu_seqlens: Integers | None, lengths: Integers | None, device: torch.device | str | None
) -> Tensor:
    """Where documents begin and the last one ends, ``[n + 1]``, from either argument."""
    if (cu_seqlens is None) == (lengths is None):
        given = "both" if lengths is not None else "neither"
        raise ValueError(f"expected cu_seqlens or lengths, got {given}")
    if lengths is None:
        assert cu_seqlens is not None
        return check_end("cu_seqlens", checked_offsets("cu_seqlens", cu_seqlens, device))
    x = _one_dim("lengths", lengths, device)
    if arguments.can_read(x) and x.numel():
        for length in map(int, x.aminmax()):
            arguments.check_size("lengths", length)
    return check_end("lengths", torch.nn.functional.pad(x.cumsum(0), (1, 0)))


def end_of(cu_seqlens: Integers | None, lengths: Integers | None) -> int | None:
    """Where the last document of a checked list ends; None for tensors, which may be traced."""
    if isinstance(lengths, (list, tuple)):
        return sum(map(int, lengths))
    return int(cu_seqlens[-1]) if isinstance(cu_seqlens, (list, tuple)) else None


def checked_offsets(name: str, given: Integers, device: torch.device | str | None) -> Tensor:
    """``[n + 1]`` int64, its values checked where they can be read."""
    x = _one_dim(name, given, device)
    if x.shape[0] == 0:
        raise ValueError(f"{name}: expected [n + 1] for n documents, got [0]")
    if arguments.can_read(x) and (x[0] != 0 or (x.diff() < 0).any()):
        raise ValueError(f"{name}: expected to begin with 0 and not to decrease, got {x.tolist()}")
    return x


def check_end(name: str, offsets: Tensor) -> Tensor:
    """``offsets``; raises ValueError if positions would not fit the limits of a mask."""
    if arguments.can_read(offsets):
        arguments.check_size(f"{name}: the last position", int(offsets[-1]))
    return offsets


def _one_dim(name: str, given: Integers, device: torch.device | str | None) -> Tensor:
    x = arguments.integers(name, given, device)
    if arguments.is_dtensor(x):
        raise TypeError(f"{name}: expected a plain tensor, got a DTensor: write x.full_tensor()")
    if x.dim() != 1:
        raise ValueError(f"{name}: expected 1 dim, got {list(x.shape)}")
    return x


def documents(
    offsets: Tensor,
    offsets_k: Tensor,
    length: int | None,
    causal: bool | str,
    window: Window,
) -> tuple[Tensor, Tensor]:
    """(begin, end) of the keys of each packed query; a query past the last document has none."""
    if arguments.is_bool(causal):
        causal = bool(causal)
    else:
        arguments.check_choice("causal", causal, ("top_left", "bottom_right"))
    if offsets.device != offsets_k.device:
        raise ValueError(
            f"cu_seqlens_k: expected a tensor on {offsets.device}, got one on {offsets_k.device}"
        )
    if offsets.shape != offsets_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected as many documents as cu_seqlens has, {list(offsets.shape)}, "
            f"got {list(offsets_k.shape)}"
        )
    i = torch.arange(_length(offsets, length), device=offsets.device)
    number = torch.searchsorted(offsets.contiguous(), i, right=True) - 1
    # One more document, empty, for the queries past the last one.
    (begin_q, end_q), (begin, end) = (
        (x[number], x[number + 1])
        for x in (torch.cat([given, given[-1:]]) for given in (offsets, offsets_k))
    )
    diagonal = begin + i - begin_q
    if causal != "top_left":
        diagonal = diagonal + (end - begin) - (end_q - begin_q)
    begin, end = _around(diagonal, begin, end, causal is not False, window)
    return begin[None], end[None]


def _length(offsets: Tensor, length: int | None) -> int:
    if length is None:
        return int(offsets[-1])
    length = arguments.check_size("length", length)
    if arguments.can_read(offsets) and offsets[-1] > length:
        raise ValueError(
            f"length: expected at least the last of cu_seqlens, {int(offsets[-1])}, got {length}"
        )
    return length


def segments(
    ids: Integers, causal: bool, window: Window, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """(begin, end) of the run of equal ids around each position."""
    causal = arguments.check_bool("causal", causal)
    x = arguments.integers("ids", ids, device)
    if x.dim() not in (1, 2):
        raise ValueError(f"ids: expected [M] or [B, M], got {list(x.shape)}")
    x = x if x.dim() == 2 else x[None]
    changes = x[:, 1:] != x[:, :-1]
    if arguments.can_read(x):
        runs, values = changes.sum(-1), x.sort(-1).values.diff().ne(0).sum(-1)
        if (runs != values).any():
            b = int((runs != values).nonzero()[0, 0])
            raise ValueError(
                f"ids: expected neighbours wherever ids are equal, got {x[b].tolist()}"
            )
    M = x.shape[1]
    i = torch.arange(M, device=x.device)
    begin = torch.where(torch.nn.functional.pad(changes, (1, 0)), i, 0)
    end = torch.where(torch.nn.functional.pad(changes, (0, 1)), i + 1, M)
    begin, end = begin.cummax(-1).values, end.flip(-1).cummin(-1).values.flip(-1)
    return _around(i, begin, end, causal, window)


def prefix(lengths: Integers, length: int, device: torch.device | str | None) -> Tensor:
    """The end of the keys of each position, ``[B, length]``."""
    length = arguments.check_size("length", length)
    x = _one_dim("lengths", lengths, device)
    if arguments.can_read(x) and x.numel() and not 0 <= x.min() <= x.max() <= length:
        raise ValueError(
            f"lengths: expected values in [0, {length}], got {int(x.min())} to {int(x.max())}"
        )
    i = torch.arange(length, device=x.device)
    return torch.maximum(i + 1, x[:, None]).to(torch.int32)


def _around(
    diagonal: Tensor, begin: Tensor, end: Tensor, causal: bool, window: Window
) -> tuple[Tensor, Tensor]:
    """What causal and window leave of the keys [begin, end); the diagonal is a key for each row."""
    left, right = arguments.window("window", window) or (-1, -1)
    if causal:
        right = 0
    first = begin if left < 0 else (diagonal - left).clamp(begin, end)
    last = end if right < 0 else (diagonal + right + 1).clamp(begin, end)
    return first.to(torch.int32), last.to(torch.int32)
