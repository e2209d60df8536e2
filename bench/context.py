"""What attention over many ranks will send, and how even its work is: by counts, not by time.

    python -m bench.context

``docs/distributed.md`` has the table that this prints, and tests compare the bytes with those that
ranks really send.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from fastattn.distributed import Layout


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

    def bytes_sent(self, method: str, ranks: int) -> tuple[int, int]:
        """(forward, backward) of one rank, whose share of the N rows is equal."""
        others, rows = ranks - 1, self.B * self.N // ranks
        keys = others * rows * self.Hkv * (self.D + self.E) * self.size
        sums = others * rows * self.Hkv * (self.D + self.E) * 4  # dK, dV in float32
        if method in ("gather", "ring"):
            return keys, keys + sums
        head = others * rows // ranks
        there = head * (self.H * self.D + self.Hkv * (self.D + self.E)) * self.size
        back = head * self.H * self.E * self.size
        beside = head * self.H * 4 + others * rows * self.limits * 4  # the log-sum-exp is float32
        return there + back + beside, there + back


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
        sent = [shape.bytes_sent(method, P) for method in ("heads", "gather")]
        of_heads = "-" if shape.Hkv % P else " / ".join(f"{x / 2**20:.0f}" for x in sent[0])
        gathered = " / ".join(f"{x / 2**20:.0f}" for x in sent[1])
        lines.append(f"| {P} | {of_heads} | {gathered} | {straight:.2f} | {zigzag:.2f} |")
    return lines


HEAD = [
    "| ranks | heads, MiB | gather or ring, MiB | contiguous | zigzag |",
    "|---|---|---|---|---|",
]

if __name__ == "__main__":
    print("\n".join([*HEAD, *rows()]))
