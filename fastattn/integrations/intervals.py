"""What a mask has to hold so that each query sees an interval of keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fields(begin: Tensor | None, end: Tensor | None, N: int) -> dict[str, Any]:
    """Fields of a Mask by which row i of sample b sees the keys ``begin <= j < end``.

    Args:
        begin: integers ``[B|1, M]``, of any value; None for 0.
        end: integers ``[B|1, M]``, of any value; None for N.
        N: how many keys there are.
    """
    ends = {"kv_begin": begin, "kv_len": end}
    return {name: x.clamp(0, N) for name, x in ends.items() if x is not None}


def largest(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The elementwise maximum of those that are there."""
    return torch.maximum(a, b) if a is not None and b is not None else b if a is None else a


def smallest(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The elementwise minimum of those that are there."""
    return torch.minimum(a, b) if a is not None and b is not None else b if a is None else a
