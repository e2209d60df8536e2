"""``fastattn.NadarayaWatson`` in plain PyTorch, and how a bandwidth is learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from tqdm import trange


class PlainNadarayaWatson(nn.Module):
    """Textbook Gaussian kernel regression: all differences, then a softmax.

    It has the parameter, the call and the results of ``fastattn.NadarayaWatson``, but makes tensors
    [M, N, D] and [M, N].
    """

    def __init__(self, bandwidth: float | list[float], learnable: bool = False) -> None:
        super().__init__()
        start = torch.as_tensor(bandwidth, dtype=torch.float32).log()
        self.log_bandwidth = nn.Parameter(start, requires_grad=learnable)

    @property
    def bandwidth(self) -> Tensor:
        return self.log_bandwidth.exp()

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None = None
    ) -> Tensor:
        """[M, D], [N, D] and [N] -> [M]; ``attn_mask`` [M, N]: True = take part."""
        distances = (queries[:, None] - keys[None]) / self.bandwidth
        scores = -distances.square().sum(dim=-1) / 2
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        return scores.softmax(dim=-1) @ values


def far_apart(points: int, neighbours: int) -> Tensor:
    """[N, N], True where ``|i - j| > neighbours``: points that may help to estimate a point in
    training.

    With 0, a point does not see itself (leave one out). To learn to fill gaps, leave out as many
    neighbours on either side as a point in a gap lacks.
    """
    index = torch.arange(points)
    return (index[:, None] - index[None]).abs() > neighbours


def loss(model: nn.Module, x: Tensor, y: Tensor, others: Tensor) -> Tensor:
    """Mean square error at the points, each estimated from ``others`` [N, N]."""
    return (model(x, x, y, attn_mask=others) - y).square().mean()


def learn(model: nn.Module, x: Tensor, y: Tensor, others: Tensor, steps: int, name: str) -> None:
    """Fits the bandwidth."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with trange(steps, desc=name, unit="step") as progress:
        for _ in progress:
            optimizer.zero_grad()
            error = loss(model, x, y, others)
            error.backward()
            optimizer.step()
            progress.set_postfix(mse=f"{error.item():.4f}")
