"""nn.TransformerEncoder between an embedding and one of three heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.common.vocabulary import PADDING
from examples.text_classification.dataset import Batch


class Encoder(nn.Module):
    """Characters [B, N] -> features with context, [B, N, dim].

    Args:
        vocabulary: number of characters; the next number means [MASK].
        max_length: the longest text.
        dim: features of a character.
        num_heads: heads of each attention.
        num_layers: encoder layers.
        dropout: on the embedding.
    """

    def __init__(
        self,
        vocabulary: int,
        max_length: int,
        *,
        dim: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary + 1, dim, padding_idx=PADDING)
        self.places = nn.Embedding(max_length, dim)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.1)
        # No dropout in the layers. It would drop other elements in the plain twin, whose attention
        # output has another memory layout, and their losses could not be compared.
        layer = nn.TransformerEncoderLayer(
            dim, num_heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, num_layers, nn.LayerNorm(dim), enable_nested_tensor=False
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        return self.layers(self.dropout(x), src_key_padding_mask=tokens == PADDING)


class GapFiller(nn.Module):
    """Logits of the characters at positions ``where`` (bool [B, N]): [positions, vocabulary].

    The last layer shares the weights of the embedding.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        dim = encoder.characters.embedding_dim
        self.transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.bias = nn.Parameter(torch.zeros(encoder.characters.num_embeddings - 1))

    def forward(self, tokens: Tensor, where: Tensor) -> Tensor:
        features = self.transform(self.encoder(tokens)[where])
        return features @ self.encoder.characters.weight[:-1].T + self.bias


class Tagger(nn.Module):
    """A logit for each character [B, N]: whether a word begins there."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.linear = nn.Linear(encoder.characters.embedding_dim, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.encoder(tokens)).squeeze(-1)


class Classifier(nn.Module):
    """Two logits for each review, from the mean of its characters. Called like task 1's model."""

    def __init__(self, encoder: Encoder, dropout: float = 0.3) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(encoder.characters.embedding_dim, 2)

    def forward(self, batch: Batch) -> tuple[Tensor, None]:
        inside = (batch.characters != PADDING)[..., None]
        mean = (self.encoder(batch.characters) * inside).sum(dim=1) / batch.lengths[:, None]
        return self.linear(self.dropout(mean)), None
