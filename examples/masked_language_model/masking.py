"""What to hide from the model, and what it has to say."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from examples.common.vocabulary import PADDING, SPECIAL

IGNORED = -100  # a place that has no target: cross_entropy passes over it


class Masked(NamedTuple):
    """``tokens`` [B, N] as the model sees them; ``targets`` [B, N]: what stood there, or -100."""

    tokens: Tensor
    targets: Tensor


def mask_tokens(tokens: Tensor, vocabulary: int, generator: torch.Generator) -> Masked:
    """Chooses 15% of the places: 80% of them hidden, 10% replaced at random, 10% left as they are.

    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019, section 3.1. What
    is left as it is must be said, too: so the model cannot trust any place.

    Args:
        tokens: ``[B, N]``, padded. Padding is never chosen.
        vocabulary: number of tokens; the number itself stands for [MASK].
        generator: of the random choices.
    """

    def chance() -> Tensor:
        return torch.rand(tokens.shape, generator=generator)

    chosen = (chance() < 0.15) & (tokens != PADDING)
    targets = tokens.where(chosen, IGNORED)
    kind = chance()
    other = torch.randint(len(SPECIAL), vocabulary, tokens.shape, generator=generator)
    hidden = tokens.masked_fill(chosen & (kind < 0.8), vocabulary)
    return Masked(other.where(chosen & (kind >= 0.9), hidden), targets)
