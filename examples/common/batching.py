"""Batches of similar length."""

from __future__ import annotations

import random


def by_length(
    indices: list[int], lengths: list[int], size: int, rng: random.Random
) -> list[list[int]]:
    """Batches of ``indices`` with similar ``lengths``, so that little is padding.

    The order is random. Noise on the lengths puts different samples together each time.
    """
    ordered = sorted(indices, key=lambda index: lengths[index] * rng.uniform(0.9, 1.1))
    batches = [ordered[n : n + size] for n in range(0, len(ordered), size)]
    rng.shuffle(batches)
    return batches
