"""A Transformer encoder-decoder that trains on all words at once and decodes with cached keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.common.vocabulary import PADDING
from fastattn import KVCache, MultiheadAttention


def positions(begin: int, end: int, dim: int) -> Tensor:
    """Sinusoids [end - begin, dim]: the sine and cosine of position / 10000^(2i / dim)."""
    place = torch.arange(begin, end, dtype=torch.float64)[:, None]
    angle = place * 10000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


class EncoderLayer(nn.Module):
    """``x + SelfAttention(norm(x))``, then ``x + FeedForward(norm(x))``."""

    def __init__(self, dim: int, heads: int, dropout: float, attention: type[nn.Module]) -> None:
        super().__init__()
        self.attention = attention(dim, heads, dropout, batch_first=True)
        self.attention_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Takes [B, N, dim]; ``padding`` [B, N] is True where there is no word."""
        y = self.attention_norm(x)
        y, _ = self.attention(y, y, y, key_padding_mask=padding, need_weights=False)
        x = x + self.dropout(y)
        return x + self.dropout(self.feed_forward(x))


class DecoderLayer(EncoderLayer):
    """An encoder layer with causal self-attention, and then attention to the encoder's states.

    In training all words come at once. In decoding they come one by one, with ``caches``.
    """

    def __init__(self, dim: int, heads: int, dropout: float, attention: type[nn.Module]) -> None:
        super().__init__(dim, heads, dropout, attention)
        self.cross = attention(dim, heads, dropout, batch_first=True)
        self.cross_norm = nn.LayerNorm(dim)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        padding: Tensor,
        caches: LayerCaches | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Words [B, M, dim], states [B, N, dim] -> [B, M, dim], weights of the states [B, M, N]."""
        y = self.attention_norm(x)
        if caches is None:
            M = x.shape[1]
            later = torch.ones(M, M, dtype=torch.bool, device=x.device).triu(1)
            y, _ = self.attention(y, y, y, attn_mask=later, is_causal=True, need_weights=False)
        else:
            y, _ = self.attention(y, y, y, cache=caches.past, need_weights=False)
        x = x + self.dropout(y)
        cached = {} if caches is None else {"cache": caches.source}
        y, weights = self.cross(
            self.cross_norm(x), memory, memory, padding, need_weights=need_weights, **cached
        )
        x = x + self.dropout(y)
        return x + self.dropout(self.feed_forward(x)), weights


class LayerCaches:
    """Projected keys and values of one decoder layer: of the words so far, and of the source."""

    def __init__(self) -> None:
        self.past = KVCache()
        self.source = KVCache(static=True)


class DecodingState:
    """What the decoder keeps from word to word, by hypothesis."""

    def __init__(self, memory: Tensor, padding: Tensor, layers: int) -> None:
        self.memory = memory  # [B, N, dim], read at the first word only; then its keys are cached
        self.padding = padding  # [B, N]
        self.caches = [LayerCaches() for _ in range(layers)]

    def reorder(self, rows: Tensor) -> None:
        """Hypothesis ``rows[b]`` becomes hypothesis b. Both have the same source."""
        for caches in self.caches:
            caches.past.reorder(rows)
        if len(rows) != len(self.padding):  # otherwise the memory is the same
            self.padding = self.padding[rows]
            for caches in self.caches:
                caches.source.reorder(rows)


class Transformer(nn.Module):
    """An encoder with self-attention; a decoder with causal self-attention and cross-attention.

    Args:
        source_size, target_size: sizes of the vocabularies.
        dim, heads, layers: features of embeddings and states, attention heads, layers each side.
        dropout: on embeddings, attention weights, and the outputs of layers.
        attention: the class of all attention, ``nn.MultiheadAttention`` or a compatible one. Only
            fastattn's has a ``cache``, which ``begin`` and ``next_words`` need.

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762. Norms come first in each layer,
    as in Xiong et al., 2020, https://arxiv.org/abs/2002.04745.
    """

    def __init__(
        self,
        source_size: int,
        target_size: int,
        *,
        dim: int = 192,
        heads: int = 4,
        layers: int = 3,
        dropout: float = 0.2,
        attention: type[nn.Module] = MultiheadAttention,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.source = nn.Embedding(source_size, dim, padding_idx=PADDING)
        self.target = nn.Embedding(target_size, dim, padding_idx=PADDING)
        options = (dim, heads, dropout, attention)
        self.encoder = nn.ModuleList(EncoderLayer(*options) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(dim)
        self.decoder = nn.ModuleList(DecoderLayer(*options) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, target_size)
        self.out.weight = self.target.weight  # input and output share the word embeddings
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Embeddings of length 1, because they also turn states into words."""
        for embedding in (self.source, self.target):
            nn.init.normal_(embedding.weight, std=self.dim**-0.5)
            with torch.no_grad():
                embedding.weight[PADDING].zero_()

    def embed(self, embedding: nn.Embedding, words: Tensor, begin: int = 0) -> Tensor:
        """[B, N] -> [B, N, dim], the first at position ``begin``."""
        place = positions(begin, begin + words.shape[1], self.dim).to(embedding.weight)
        return self.dropout(embedding(words) * self.dim**0.5 + place)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N] -> states [B, N, dim], and their padding [B, N]."""
        padding, x = source == PADDING, self.embed(self.source, source)
        for layer in self.encoder:
            x = layer(x, padding)
        return self.encoder_norm(x), padding

    def decode(
        self,
        words: Tensor,
        memory: Tensor,
        padding: Tensor,
        caches: list[LayerCaches] | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Words [B, M] -> logits [B, M, target_size], weights [B, M, N] of the last layer."""
        x = self.embed(self.target, words, caches[0].past.length if caches else 0)
        weights = None
        for n, layer in enumerate(self.decoder):
            x, weights = layer(x, memory, padding, caches and caches[n], need_weights)
        return self.out(self.decoder_norm(x)), weights

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: logits [B, M, target_size] of the words after ``target``."""
        return self.decode(target, *self.encode(source))[0]

    def align(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """How much each word of ``target`` looks at each of ``source``, [B, M, N]."""
        weights = self.decode(target, *self.encode(source), need_weights=True)[1]
        assert weights is not None
        return weights

    def begin(self, source: Tensor, lengths: Tensor) -> DecodingState:
        """Reads the source; returns one empty hypothesis each."""
        return DecodingState(*self.encode(source), len(self.decoder))

    def next_words(self, words: Tensor, state: DecodingState) -> Tensor:
        """One more word each [B, 1] -> logits of the next word [B, target_size]."""
        return self.decode(words, state.memory, state.padding, state.caches)[0][:, -1]
