"""What to hide from the model, and what the model must predict."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from examples.common.vocabulary import PADDING, SPECIAL

IGNORED = -100  # a position without a target; cross_entropy skips it


class Masked(NamedTuple):
    """``tokens`` [B, N] that the model sees; ``targets`` [B, N]: the original token, or -100."""

    tokens: Tensor
    targets: Tensor


def mask_tokens(tokens: Tensor, vocabulary: int, generator: torch.Generator) -> Masked:
    """Chooses 15% of the positions: 80% of them hidden, 10% random, 10% unchanged.

    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019, section 3.1. The
    model must predict unchanged tokens as well, so it cannot trust any position.

    Args:
        tokens: ``[B, N]``, padded. Padding is never chosen.
        vocabulary: number of tokens; this number itself means [MASK].
        generator: makes the random choices.
    """

    def chance() -> Tensor:
        return torch.rand(tokens.shape, generator=generator)

    chosen = (chance() < 0.15) & (tokens != PADDING)
    targets = tokens.where(chosen, IGNORED)
    kind = chance()
    other = torch.randint(len(SPECIAL), vocabulary, tokens.shape, generator=generator)
    hidden = tokens.masked_fill(chosen & (kind < 0.8), vocabulary)
    return Masked(other.where(chosen & (kind >= 0.9), hidden), targets)
