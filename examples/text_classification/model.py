"""Embedding, self-attention, mean over characters, classifier."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from examples.common.vocabulary import PADDING
from examples.text_classification.dataset import Batch
from fastattn import SelfAttention


class PlainSelfAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention called like ``fastattn.SelfAttention``, for comparison."""

    def __init__(self, hidden_dim: int, num_heads: int) -> None:
        super().__init__(hidden_dim, num_heads, batch_first=True)

    def forward(
        self, x: Tensor, valid_lens: Tensor, need_weights: bool = True
    ) -> tuple[Tensor | None, Tensor]:
        """[B, N, hidden_dim] and lengths [B] -> weights [B, N, N] or None, and the output."""
        padding = torch.arange(x.shape[1], device=x.device) >= valid_lens[:, None]
        out, weights = super().forward(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        return weights, out


def plain_parameters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames the parameters of a model on SelfAttention for one on PlainSelfAttention."""
    return {
        name.replace("in_proj.weight", "in_proj_weight").replace("in_proj.bias", "in_proj_bias"): x
        for name, x in state.items()
    }


class ReviewClassifier(nn.Module):
    """Two logits for each review.

    A character's features are the sum of three embeddings: the character, its bigram and its
    position. Each layer adds the output of self-attention. The mean over a review is classified.

    Args:
        characters: size of the vocabulary of characters.
        bigrams: size of the vocabulary of bigrams.
        max_length: the longest text.
        attention: makes a layer's attention from (hidden_dim, num_heads).
        hidden_dim: features of a character.
        num_heads: heads of each attention.
        num_layers: attention layers.
        dropout: on embeddings and on the mean.
    """

    def __init__(
        self,
        characters: int,
        bigrams: int,
        max_length: int,
        attention: Callable[[int, int], nn.Module] = SelfAttention,
        *,
        hidden_dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, hidden_dim, padding_idx=PADDING)
        self.bigrams = nn.Embedding(bigrams, hidden_dim, padding_idx=PADDING)
        self.places = nn.Embedding(max_length, hidden_dim)
        for embedding in (self.characters, self.bigrams, self.places):
            nn.init.normal_(embedding.weight, std=0.1)
        self.attentions = nn.ModuleList(attention(hidden_dim, num_heads) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden_dim) for _ in range(num_layers))
        self.classifier = nn.Linear(hidden_dim, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: Batch, need_weights: bool = False) -> tuple[Tensor, list]:
        """Logits [B, 2], and each layer's weights [B, N, N], or None unless requested."""
        places = self.places.weight[: batch.characters.shape[1]]
        x = self.characters(batch.characters) + self.bigrams(batch.bigrams) + places
        x = self.dropout(x)
        layers = []
        for attention, norm in zip(self.attentions, self.norms, strict=True):
            weights, seen = attention(norm(x), batch.lengths, need_weights=need_weights)
            x = x + seen
            layers.append(weights)
        return self.classifier(self.dropout(_mean(x, batch.lengths))), layers


def _mean(x: Tensor, lengths: Tensor) -> Tensor:
    """[B, N, hidden_dim] -> [B, hidden_dim], without padding."""
    inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return (x * inside[..., None]).sum(dim=1) / lengths[:, None]
