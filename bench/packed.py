"""Packed documents, and what users do with them today: one call each, or a padded batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LOOP, PADDED = "a call each", "padded batch"
MOST_MASKED = 2**27  # pairs of a dense mask that torch is given


def lengths(N: int, mean: int) -> list[int]:
    """Lengths of documents, N in all: exponential, as texts are cut from a corpus."""
    rng = torch.Generator().manual_seed(0)
    drawn = torch.empty(2 * N // mean + 8).exponential_(1 / mean, generator=rng)
    ends = drawn.round().clamp(min=max(1, mean // 8)).long().cumsum(0)
    ends = [*(n for n in ends.tolist() if n < N), N]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def one_by_one(documents: list[int], qkv: list[Tensor]) -> Tensor:
    """A causal call of torch's function for every document."""
    parts = zip(*(x.split(documents, 2) for x in qkv), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*x, is_causal=True) for x in parts], 2)


@dataclass
class Padding:
    """Documents as rows of a batch, as long as the longest of them.

    Padding stands at the end, where causal queries of a document do not look.
    """

    places: Tensor  # [documents, longest], of a position
    filled: Tensor  # likewise: False where there is none

    def pad(self, x: Tensor) -> Tensor:
        """[1, H, N, D] -> [documents, H, longest, D], zeros behind each."""
        padded = x[0][:, self.places].transpose(0, 1)
        return (padded * self.filled[:, None, :, None]).contiguous()

    def pack(self, x: Tensor) -> Tensor:
        """The opposite of ``pad``."""
        return x.transpose(0, 1)[:, self.filled][None]


def padding(documents: list[int], device: torch.device) -> Padding:
    """How these documents become a batch, on the device of the tensors."""
    sizes = torch.tensor(documents)
    column = torch.arange(int(sizes.max()))
    filled = column < sizes[:, None]
    begins = sizes.cumsum(0) - sizes
    places = torch.where(filled, begins[:, None] + column, 0)
    return Padding(places.to(device), filled.to(device))


def attend_padded(qkv: list[Tensor]) -> Callable[[], Tensor]:
    """A causal call of torch's function on a padded batch."""
    return lambda: F.scaled_dot_product_attention(*qkv, is_causal=True)


def too_large(M: int, N: int) -> Callable[[], Tensor]:
    """Stands for a call whose dense mask would take more memory than a user has for it."""

    def refuse() -> Tensor:
        raise MemoryError(f"a dense mask of {M} x {N} floats takes {4 * M * N / 2**30:.0f} GiB")

    return refuse
