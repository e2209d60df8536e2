"""Batches of similar length."""

from __future__ import annotations

import random


def by_length(
    indices: list[int], lengths: list[int], size: int, rng: random.Random
) -> list[list[int]]:
    """Batches of ``indices`` whose ``lengths`` are similar, so that little is padding.

    In random order, and with some noise on the lengths, so that not always the same ones meet.
    """
    ordered = sorted(indices, key=lambda index: lengths[index] * rng.uniform(0.9, 1.1))
    batches = [ordered[n : n + size] for n in range(0, len(ordered), size)]
    rng.shuffle(batches)
    return batches
