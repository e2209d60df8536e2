"""The parameter of a score beside query and key: the additive weight, the gaussian's bandwidth."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn.problem import arguments


def has_head_dim(score: str, query: Tensor, weight: Tensor | None) -> bool:
    """For the additive score, whether weight is [H, D]; else whether dim -3 exists, as in torch.

    Raises:
        ValueError: the dims of weight and query do not fit.
    """
    if score != "additive":
        return query.dim() >= 3
    assert weight is not None
    if weight.dim() not in (1, 2):
        raise ValueError(f"weight: expected [D] or [H, D], got {list(weight.shape)}")
    if weight.dim() == 2 and query.dim() < 3:
        raise ValueError(f"query: a weight [H, D] needs [..., H, M, D], got {list(query.shape)}")
    return weight.dim() == 2


def match_weight(weight: Tensor, H: int, D: int) -> Tensor:
    """The additive weight as ``[H, D]``.

    Raises:
        ValueError: its shape does not fit the query.
    """
    w = weight if weight.dim() == 2 else weight.unsqueeze(0)
    heads, size = w.shape  # compared one by one, as `in` a tuple does not trace where D is 1
    if size != D or (heads != 1 and heads != H):
        raise ValueError(
            f"weight: expected [{D}] or [{H}, {D}] to fit query, got {list(weight.shape)}"
        )
    return w.expand(H, D)


def bandwidth_tensor(bandwidth: float | Tensor | None, query: Tensor) -> Tensor:
    """A bandwidth, 1 for None, in float32 at least: half types would spoil the whole score.

    Raises:
        TypeError: it is neither a number nor a tensor of floats.
        ValueError: it is a number out of range, or on another device.
    """
    precision = torch.promote_types(query.dtype, torch.float32)
    if not isinstance(bandwidth, Tensor):
        bandwidth = 1.0 if bandwidth is None else bandwidth
        arguments.check_real("bandwidth", bandwidth)
        if not (1e-30 <= bandwidth <= 1e30 or bandwidth == torch.inf):
            raise ValueError(f"bandwidth: expected 1e-30 to 1e30, or infinity, got {bandwidth}")
        return torch.full((), float(bandwidth), dtype=precision, device=query.device)
    if not bandwidth.is_floating_point():
        raise TypeError(f"bandwidth: expected a tensor of floats, got {bandwidth.dtype}")
    if bandwidth.device != query.device and bandwidth.dim():
        raise ValueError(
            f"bandwidth: expected the device of query, {query.device}, got {bandwidth.device}"
        )
    return bandwidth.to(device=query.device, dtype=precision)


def match_bandwidth(bandwidth: Tensor, H: int, D: int) -> Tensor:
    """A bandwidth ``[B|1, H|1, 1, D|1]`` as ``[H, D]``, or ``[B, H, D]`` where samples differ."""
    return bandwidth.squeeze(2).expand(-1, H, D).squeeze(0)
