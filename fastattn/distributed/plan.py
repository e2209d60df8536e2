"""What a method needs to know of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from fastattn import blocks
from fastattn.blocks import Cut
from fastattn.distributed.comm import Group
from fastattn.distributed.layout import Layout
from fastattn.problem import Problem


@dataclass(frozen=True)
class Plan:
    """One call on this rank: its rows, all keys.

    ``p`` has this rank's rows in M, in the order of the layout, and all keys in N. Its mask and the
    bias have these rows, or broadcast, and all keys in the order of positions.
    """

    p: Problem
    backend: str
    layout: Layout  # of the queries
    keys: Layout
    group: Group
    heads_per_step: int  # key heads
    lse: bool  # whether the log-sum-exp is wanted
    rows: tuple[str, ...]  # which of "bias" and "keep" have rows, of which this rank has its own

    def pieces(self, p: Problem) -> Iterator[tuple[Cut, Problem]]:
        """Neighbouring rows, and the problem that they are a block of.

        ``p`` is this rank's problem, or that of some of its heads.
        """
        for at, first, size in self.layout.of(self.group.rank):
            origin = p.origin._replace(i=first - at, M=self.layout.length, N=p.N)
            cut = blocks.whole(p)._replace(i=(at, at + size))
            yield cut, dataclasses.replace(p, origin=origin)

    def steps(self) -> list[Cut]:
        """Some key heads at a time, with their query heads."""
        p, each = self.p, self.heads_per_step
        group = p.H // p.Hkv if p.Hkv else 1
        firsts = range(0, p.Hkv, each)
        ends = [(k, min(k + each, p.Hkv)) for k in firsts]
        return [blocks.whole(p)._replace(h=(a * group, b * group)) for a, b in ends]
