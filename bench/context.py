"""What attention over many ranks will send, and how even its work is: by counts, not by time.

    python -m bench.context

``docs/distributed.md`` has the table that this prints, and tests compare the bytes with those that
ranks really send.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fastattn.distributed import Layout
from fastattn.distributed.heads import heads_of_ranks


@dataclass(frozen=True)
class Shape:
    """One call; ``size``: bytes of a number."""

    B: int = 1
    H: int = 32
    Hkv: int = 8
    N: int = 131072
    D: int = 128
    E: int = 128
    size: int = 2
    limits: int = 0  # kv_len and kv_begin of rows, which ``heads`` brings to every rank
    lse: bool = False  # whether it is returned: ``heads`` brings it to its rows

    def bytes_sent(self, method: str, sizes: Sequence[int], rank: int = 0) -> tuple[int, int]:
        """(forward, backward) of one rank, beside which ranks hold so many rows each.

        Raises:
            ValueError: ``heads`` cannot share these heads among the ranks.
        """
        ranks, own, length = len(sizes), sizes[rank], sum(sizes)
        F, away = self.D + self.E, length - own
        of_ring = self.B * self.Hkv * F  # numbers of a key
        sums = of_ring * away * 4  # dK, dV in float32
        padded = max(sizes) * (ranks - 1)  # what all bring together has equal shares
        if method == "gather":
            return of_ring * padded * self.size, of_ring * padded * self.size + sums
        if method == "ring":
            keys = of_ring * (length - sizes[(rank + 1) % ranks]) * self.size
            return keys, keys + sums
        queries, keys = ([b - a for a, b in x] for x in heads_of_ranks(self.H, self.Hkv, ranks))
        q, k = queries[rank], keys[rank]
        there = own * ((self.H - q) * self.D + (sum(keys) - k) * F) * self.size
        out = away * q * self.E * self.size
        limits = padded * self.limits * 4
        back = (own * (self.H - q) * self.E + away * (q * self.D + k * F)) * self.size
        if self.lse:  # in float32
            out, back = out + away * q * 4, back + own * (self.H - q) * 4
        return self.B * (there + out + limits), self.B * back


def imbalance(layout: Layout, cost: list[int]) -> float:
    """The dearest rank's work over the mean."""
    loads = layout.loads(cost)
    return max(loads) / statistics.mean(loads)


def rows(ranks: tuple[int, ...] = (8, 64, 256, 1024)) -> list[str]:
    """The lines of the table."""
    shape = Shape()
    cost = list(range(1, shape.N + 1))
    lines = []
    for P in ranks:
        units = max(1, min(128, shape.N // (2 * P)))
        zigzag = imbalance(Layout.zigzag(shape.N, P, unit=units), cost)
        straight = imbalance(Layout.contiguous(shape.N, P), cost)
        sizes = [shape.N // P] * P
        of_heads, gathered = (
            " / ".join(f"{x / 2**20:.0f}" for x in shape.bytes_sent(method, sizes)) if some else "-"
            for method, some in (("heads", shape.Hkv % P == 0), ("gather", True))
        )
        lines.append(f"| {P} | {of_heads} | {gathered} | {straight:.2f} | {zigzag:.2f} |")
    return lines


HEAD = [
    "| ranks | heads, MiB | gather or ring, MiB | contiguous | zigzag |",
    "|---|---|---|---|---|",
]

if __name__ == "__main__":
    print("\n".join([*HEAD, *rows()]))
