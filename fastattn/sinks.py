"""Attention sinks: one more logit a head, which takes part of the softmax and has no value.

    lse' = log(e^lse + e^sink)      out' = out e^(lse - lse')      weights likewise

A few operations on the results, so every backend, score and mask has sinks.
Gradients follow by autograd: that of the sink is ``-sum_i e^(sink - lse'_i) dO_i . O'_i`` and the
like for weights and log-sum-exp. Dropout multiplies weights, as this does, so their order does not
matter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.problem import validate


def check(sink: Tensor, query: Tensor) -> None:
    """Raises TypeError or ValueError for anything but ``[H]`` beside query ``[B, H, M, D]``."""
    validate.check_dense("sink", sink, query, (query.dtype, torch.float32))
    if sink.shape != query.shape[1:2]:
        H = query.shape[1]
        raise ValueError(f"sink: expected [{H}], one for each head, got {list(sink.shape)}")


def attach(
    sink: Tensor, out: Tensor, lse: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(out ``[B, H, M, E]``, lse ``[B, H, M]``, weights) beside sinks ``[H]``.

    A row without keys has output 0, and the log-sum-exp is the sink.
    """
    sink = sink.to(lse.dtype)[:, None]
    empty = lse == -torch.inf
    lse = lse.masked_fill(empty, 0.0)
    # Of a row's weight, what its keys keep. Its gradient is share (1 - share), and logsigmoid knows
    # the digits of 1 - share, which the gradient of sigmoid loses where keys keep nearly all.
    share = F.logsigmoid(lse - sink).exp().masked_fill(empty, 0.0)
    total = torch.where(empty, sink, torch.logaddexp(lse, sink))

    def scaled(x: Tensor) -> Tensor:
        return (x * share[..., None]).to(x.dtype)

    return scaled(out), total, scaled(weights) if weights.dim() == 4 else weights
