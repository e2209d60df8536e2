"""Translates by beam search. Greedy decoding is a search with one beam."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from examples.common.vocabulary import BEGIN, END, PADDING


class State(Protocol):
    """What a decoder keeps for every hypothesis, from word to word."""

    def reorder(self, rows: Tensor) -> None:
        """Hypothesis ``rows[b]`` becomes hypothesis b. Both have the same source."""


class Decoder(Protocol):
    """What a translator needs so that it can decode word by word."""

    def begin(self, source: Tensor, lengths: Tensor) -> State:
        """Sources [B, N] with lengths [B] -> the state of one empty hypothesis each."""

    def next_words(self, words: Tensor, state: Any) -> Tensor:
        """One more word each [B, 1] -> logits of the next [B, target_size]. Changes the state."""


@torch.no_grad()
def translate(
    model: Decoder, source: Tensor, lengths: Tensor, beams: int = 1, max_length: int = 60
) -> list[list[int]]:
    """The likeliest translation found for each sample, without BEGIN and END.

    Args:
        model: in evaluation mode.
        source: [B, N], padded, with ``lengths`` [B].
        beams: hypotheses that are kept for each sample; 1 is greedy.
        max_length: most tokens of a translation.

    Hypotheses compete by their mean log-probability per token. The source is read, and its keys are
    projected, only once.
    """
    B, device = source.shape[0], source.device
    samples = torch.arange(B, device=device)
    state = model.begin(source, lengths)
    words = torch.full((B, 1), BEGIN, device=device)
    total, count = torch.zeros(2, B, 1, device=device)  # log-probability, tokens
    ended = torch.zeros(B, 1, dtype=torch.bool, device=device)
    for _ in range(max_length):
        width = total.shape[1]  # 1 at first, then ``beams``
        scores = model.next_words(words[:, -1:], state).log_softmax(dim=-1)
        step = _next_words(scores.view(B, width, -1), ended)
        longer = count + ~ended
        # The best of all continuations, by mean; stored as sums.
        sums = total[:, :, None] + step
        size = step.shape[-1]
        best = (sums / longer[:, :, None]).flatten(1).topk(beams, dim=1).indices
        beam, word = best // size, best % size
        total = sums.flatten(1).gather(1, best)
        count = longer.gather(1, beam)
        ended = ended.gather(1, beam) | (word == END)
        rows = (beam + width * samples[:, None]).flatten()
        state.reorder(rows)
        words = torch.cat([words[rows], word.view(-1, 1)], dim=1)
        if ended.all():
            break
    likeliest = (total / count).argmax(dim=1)
    chosen = words.view(B, beams, -1)[samples, likeliest, 1:]
    return [[n for n in row if n not in (END, PADDING)] for row in chosen.tolist()]


def _next_words(step: Tensor, ended: Tensor) -> Tensor:
    """An ended hypothesis continues with PADDING at no cost; no other hypothesis may."""
    step[:, :, [PADDING, BEGIN]] = -torch.inf
    step[ended] = -torch.inf
    step[:, :, PADDING] = torch.where(ended, 0.0, -torch.inf)
    return step


class Recomputing:
    """A translator that keeps only the words, and reads everything again for each one. It shows
    what caches save, and whether they are right.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def begin(self, source: Tensor, lengths: Tensor) -> WordsSoFar:
        return WordsSoFar(source, lengths)

    def next_words(self, words: Tensor, state: WordsSoFar) -> Tensor:
        state.words = torch.cat([state.words, words], dim=1)
        return self.model(state.source, state.lengths, state.words)[:, -1]


class WordsSoFar:
    """The state of ``Recomputing``."""

    def __init__(self, source: Tensor, lengths: Tensor) -> None:
        self.source, self.lengths = source, lengths
        self.words = source.new_empty(len(source), 0)

    def reorder(self, rows: Tensor) -> None:
        self.source, self.lengths, self.words = (
            x[rows] for x in (self.source, self.lengths, self.words)
        )
