"""Translating: beam search, of which greedy decoding is the narrowest case."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.common.vocabulary import BEGIN, END, PADDING
from examples.translation.model import Translator


@torch.no_grad()
def translate(
    model: Translator, source: Tensor, lengths: Tensor, beams: int = 1, max_length: int = 60
) -> list[list[int]]:
    """The likeliest translation found of each sample, without BEGIN and END.

    Args:
        source: [B, N], padded, with ``lengths`` [B].
        beams: hypotheses that are kept of each sample; 1 is greedy.
        max_length: tokens, at most.

    Hypotheses compete by their mean log-probability a token. The source is read and its keys are
    projected once: a step costs the step.
    """
    model.eval()
    B = source.shape[0]
    memory, (h, c) = model.encode(source, lengths)
    first = torch.arange(B).repeat_interleave(beams)
    memory, state = memory.select(first), (h[:, first], c[:, first])
    words = torch.full((B * beams, 1), BEGIN)
    # At first all beams of a sample are the same: only one may go on.
    total = torch.full((B, beams), -torch.inf)
    total[:, 0] = 0.0
    ended = torch.zeros(B, beams, dtype=torch.bool)
    count = torch.zeros(B, beams)
    for _ in range(max_length):
        logits, state, _ = model.decode(words[:, -1:], memory, state)
        step = _next_words(logits[:, 0].log_softmax(dim=-1).view(B, beams, -1), ended)
        longer = count + ~ended
        # The best of all continuations of all beams, by mean; kept as sums.
        sums = total[:, :, None] + step
        size = step.shape[-1]
        best = (sums / longer[:, :, None]).flatten(1).topk(beams, dim=1).indices
        beam, word = best // size, best % size
        total = sums.flatten(1).gather(1, best)
        count = longer.gather(1, beam)
        ended = ended.gather(1, beam) | (word == END)
        rows = (beam + beams * torch.arange(B)[:, None]).flatten()
        state = tuple(x[:, rows] for x in state)
        words = torch.cat([words[rows], word.view(-1, 1)], dim=1)
        if ended.all():
            break
    likeliest = (total / count).argmax(dim=1)
    chosen = words.view(B, beams, -1)[torch.arange(B), likeliest, 1:]
    return [[n for n in row if n not in (END, PADDING)] for row in chosen.tolist()]


def _next_words(step: Tensor, ended: Tensor) -> Tensor:
    """An ended hypothesis goes on with PADDING, for free; no other may."""
    step[:, :, [PADDING, BEGIN]] = -torch.inf
    step[ended] = -torch.inf
    step[:, :, PADDING] = torch.where(ended, 0.0, -torch.inf)
    return step
