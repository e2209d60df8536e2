"""A decoder of characters. It is told where its characters stand, and how to attend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value [B, H, M, D]


def rotary(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embeddings, ``[M, width]`` each.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    speeds = 10000.0 ** (-torch.arange(0, width, 2, device=positions.device) / width)
    angles = (positions[:, None] * speeds).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Features of each position, turned by its angles. The halves are the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]


class Layer(nn.Module):
    """Causal self-attention and a perceptron, norms first: [B, M, dim] -> [B, M, dim]."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        packed = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        mixed = attend(rotate(q, turn), rotate(k, turn), v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.perceptron(x)


class CharacterModel(nn.Module):
    """Logits of the next character, ``[B, M, vocabulary]``.

    ``tokens`` [B, M] stand at ``positions`` [M] of the text, which need not follow each other. Only
    ``attend`` brings positions together, so that everything else may hold a part of them.
    """

    def __init__(self, vocabulary: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.width = dim // heads
        self.characters = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.logits = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x, turn = self.characters(tokens), rotary(positions, self.width)
        for layer in self.layers:
            x = layer(x, turn, attend)
        return self.logits(self.norm(x))
