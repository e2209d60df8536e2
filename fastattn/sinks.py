"""Attention sinks: one more logit a head in the softmax, without a value.

    out_i = sum_j e^(s_ij) v_j / (e^sink + sum_j e^(s_ij))       lse_i = log(e^sink + e^s_i1 + ...)

Every backend adds a sink to the sum of a row. A key then weighs ``e^(s_ij - lse_i)``. A backward
pass needs no more than that of a row, so no gradient but the sink's own knows of it:

    -sum_i e^(sink - lse_i) delta_i         delta_i = dO_i . O_i + sum_j W_ij dW_ij - dlse_i

Every backend has the delta of its rows, and makes that gradient too. Results of many processes are
merged before their sink counts. ``gradient`` is the same of them, and ``fold`` puts a sink in:

    share = 1 / (1 + e^(sink - lse))    out' = share out    lse' = log(e^lse + e^sink)

The share is made of what a backend saves of a row, ``e^lse = e^shift / factor``. A log-sum-exp
itself is rounded, and its rounding would be that of every number of the row.

Dropout multiplies weights, as a share does, so their order does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattn.problem import reference, validate

# Numbers of a copy in float32, for each thread: docs/decisions/0028-sinks.md.
_AT_ONCE = 2**16


def check(sink: Tensor, query: Tensor) -> None:
    """Raises TypeError or ValueError for anything but ``[H]`` beside query ``[B, H, M, D]``."""
    validate.check_dense("sink", sink, query, (query.dtype, torch.float32))
    if sink.shape != query.shape[1:2]:
        H = query.shape[1]
        raise ValueError(f"sink: expected [{H}], one for each head, got {list(sink.shape)}")


def fold(
    sink: Tensor, unit: float, out: Tensor, lse: Tensor, weights: Tensor, stats: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results of a backend without sinks, in place, beside sinks ``[H]`` or ``[B, H]``.

    ``unit``: the backend's ``shift_unit``. The weights are those of every head, or none. A row
    without keys has output 0, and the log-sum-exp is the sink.
    """
    shift, factor = stats[..., 0], stats[..., 1]
    # e^(shift - sink), of which the last digits count where it is tiny.
    e = reference.above_shift(sink, shift, unit).neg_().clamp_(max=80).exp_()
    share = (e / (e + factor).clamp_(min=reference.LEAST_FACTOR)).to(shift.dtype)
    _scale(out, share)
    if weights.dim() == 4:
        _scale(weights, share)
    factor.mul_(share)
    return out, torch.logaddexp(lse, sink.to(lse.dtype)[..., None]), weights, stats


def _scale(x: Tensor, share: Tensor) -> None:
    """x ``[B, H, M, ...]`` times the share of its row, in place.

    On CPUs torch multiplies a half type by float32 in a copy of the whole. New memory for it takes
    longer than the product, so the copies are small.
    """
    rows = _rows_at_once(x, share.dtype)
    for part, own in zip(x.split(rows, 2), share[..., None].split(rows, 2), strict=True):
        part.mul_(own)


def _rows_at_once(x: Tensor, dtype: torch.dtype) -> int:
    """Of x ``[B, H, M, ...]``, of which a copy in ``dtype`` is made: all, where none is."""
    copies = x.dtype != dtype and x.device.type == "cpu" and not torch.compiler.is_compiling()
    most = _AT_ONCE * torch.get_num_threads() if copies else x.numel()
    return max(1, x.shape[2] if x.numel() <= most else most * x.shape[2] // x.numel())


def gradient(
    sink: Tensor,
    unit: float,
    out: Tensor,
    weights: Any,
    stats: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
) -> Tensor:
    """That of the sinks, of each sample: ``[B, H]``, in the dtype of stats. Results are folded.

    ``weights`` are read where they have a gradient.
    """
    delta = _dot(grad_out, out, stats.dtype)
    if grad_weights is not None:
        known = grad_weights.masked_fill(weights == 0, 0.0)  # garbage behind a mask
        delta = delta + _dot(known, weights, stats.dtype)
    if grad_lse is not None:
        delta = delta - grad_lse
    delta = reference.without_empty_rows(delta, stats, grad_lse)
    return -(reference.known_sink_weight(sink, stats, unit) * delta).sum(-1)


def _dot(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_e grad_e x_e of each row, by products in ``dtype``: half types would make 0 or inf."""
    rows = _rows_at_once(x, dtype)
    parts = [
        (g * own.to(dtype)).sum(-1)
        for g, own in zip(grad.split(rows, 2), x.split(rows, 2), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
