"""An LSTM encoder-decoder whose attention is chosen by name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from examples.common.vocabulary import PADDING
from fastattn import AdditiveAttention, LuongAttention

KINDS = ("none", "additive", "dot", "general", "concat")


class PlainAdditiveAttention(nn.Module):
    """The textbook's additive attention, which makes a tensor [B, M, N, hidden_dim].

    Parameters, call and results are those of ``fastattn.AdditiveAttention``.
    """

    def __init__(self, query_dim: int, key_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.W_k = nn.Linear(key_dim, hidden_dim, bias=False)
        self.W_q = nn.Linear(query_dim, hidden_dim, bias=False)
        self.w_v = nn.Linear(hidden_dim, 1, bias=False)

    def project_keys(self, keys: Tensor) -> Tensor:
        return self.W_k(keys)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor,
        valid_lens: Tensor,
        *,
        need_weights: bool = False,
        cache: Tensor,
    ):
        """[B, M, query_dim], [B, N, Dv], [B] -> [B, M, Dv], and the weights."""
        hidden = torch.tanh(self.W_q(queries)[:, :, None] + cache[:, None])
        scores = self.w_v(hidden).squeeze(-1)
        padding = torch.arange(values.shape[1], device=values.device) >= valid_lens[:, None]
        weights = scores.masked_fill(padding[:, None], -torch.inf).softmax(dim=-1)
        out = weights @ values
        return (out, weights) if need_weights else out


class AttentionalVector(nn.Module):
    """``tanh(W_c [c; h])`` after an additive attention; LuongAttention contains this."""

    def __init__(self, attention: nn.Module, query_dim: int, value_dim: int) -> None:
        super().__init__()
        self.attention = attention
        self.W_c = nn.Linear(query_dim + value_dim, query_dim, bias=False)

    def project_keys(self, keys: Tensor) -> Tensor:
        return self.attention.project_keys(keys)

    def forward(self, queries, keys, values, valid_lens, *, need_weights, cache):
        seen = self.attention(
            queries, keys, values, valid_lens, need_weights=need_weights, cache=cache
        )
        context, weights = seen if need_weights else (seen, None)
        out = torch.tanh(self.W_c(torch.cat([context, queries], dim=-1)))
        return (out, weights) if need_weights else out


def make_attention(kind: str, dim: int, plain: bool = False) -> nn.Module | None:
    """The attention of one of ``KINDS`` between states of ``dim`` features; None for "none"."""
    if kind == "none":
        return None
    if kind == "additive":
        module = PlainAdditiveAttention if plain else AdditiveAttention
        return AttentionalVector(module(dim, dim, dim), dim, dim)
    return LuongAttention(dim, dim, kind)


class Memory(NamedTuple):
    """What the decoder needs from the source, by sample."""

    states: Tensor  # [B, N, dim]
    lengths: Tensor  # [B]
    cache: Tensor | None  # the attention's keys, projected once


class DecodingState:
    """What the decoder keeps from word to word, by hypothesis."""

    def __init__(self, memory: Memory, last: tuple[Tensor, Tensor]) -> None:
        self.memory = memory
        self.last = last  # h and c of the LSTM, [1, B, dim] each

    def reorder(self, rows: Tensor) -> None:
        """Hypothesis ``rows[b]`` becomes hypothesis b. Both have the same source."""
        h, c = self.last
        self.last = h[:, rows], c[:, rows]
        if len(rows) != len(self.memory.lengths):  # otherwise the memory is the same
            self.memory = Memory(*(None if x is None else x[rows] for x in self.memory))


class RecurrentTranslator(nn.Module):
    """A bidirectional LSTM encoder, an LSTM decoder, and attention from the decoder to the encoder.

    Args:
        source_size, target_size: sizes of the vocabularies.
        kind: one of ``KINDS``. With "none" the decoder gets only its first state from the source.
        dim: features of embeddings and states.
        dropout: on embeddings and on the features of the output layer.
        plain: additive attention in plain PyTorch instead of on fastattn.

    Source: Bahdanau et al., 2015, https://arxiv.org/abs/1409.0473. Attention comes after the LSTM,
    as in Luong et al., 2015, https://arxiv.org/abs/1508.04025, so that in training all steps attend
    at once.
    """

    def __init__(
        self,
        source_size: int,
        target_size: int,
        kind: str,
        *,
        dim: int = 192,
        dropout: float = 0.3,
        plain: bool = False,
    ) -> None:
        super().__init__()
        self.source = nn.Embedding(source_size, dim, padding_idx=PADDING)
        self.target = nn.Embedding(target_size, dim, padding_idx=PADDING)
        self.encoder = nn.LSTM(dim, dim // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, target_size)
        self.dropout = nn.Dropout(dropout)
        # Last, so that all kinds start with the same parameters elsewhere.
        self.attention = make_attention(kind, dim, plain)

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Memory, tuple[Tensor, Tensor]]:
        """[B, N] -> the decoder's memory, and its first state (h, c), [1, B, dim] each."""
        embedded = self.dropout(self.source(source))
        packed = pack_padded_sequence(
            embedded, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        packed, last = self.encoder(packed)
        states, _ = pad_packed_sequence(packed, batch_first=True, total_length=source.shape[1])
        cache = self.attention.project_keys(states) if self.attention else None
        # [2, B, dim / 2], forwards and backwards, become [1, B, dim].
        h, c = (torch.cat(x.unbind(), dim=-1)[None] for x in last)
        return Memory(states, lengths, cache), (h, c)

    def decode(
        self, target: Tensor, memory: Memory, state: tuple, need_weights: bool = False
    ) -> tuple[Tensor, tuple, Tensor | None]:
        """Words [B, M] -> logits of the next words [B, M, target_size], state, weights [B, M, N].

        Takes all steps at once, or one after the other with the returned state.
        """
        h, state = self.decoder(self.dropout(self.target(target)), state)
        weights = None
        if self.attention:
            seen = self.attention(
                h, memory.states, memory.states, memory.lengths,
                need_weights=need_weights, cache=memory.cache,
            )  # fmt: skip
            h, weights = seen if need_weights else (seen, None)
        return self.out(self.dropout(h)), state, weights

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: logits [B, M, target_size] of the words after ``target``."""
        memory, state = self.encode(source, lengths)
        return self.decode(target, memory, state)[0]

    def align(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """How much each word of ``target`` looks at each of ``source``, [B, M, N]."""
        memory, state = self.encode(source, lengths)
        weights = self.decode(target, memory, state, need_weights=True)[2]
        assert weights is not None
        return weights

    def begin(self, source: Tensor, lengths: Tensor) -> DecodingState:
        """Reads the source; returns one empty hypothesis each."""
        return DecodingState(*self.encode(source, lengths))

    def next_words(self, words: Tensor, state: DecodingState) -> Tensor:
        """One more word each [B, 1] -> logits of the next word [B, target_size]."""
        logits, state.last, _ = self.decode(words, state.memory, state.last)
        return logits[:, -1]
