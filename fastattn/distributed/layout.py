"""Which positions of a sequence each rank holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.problem import arguments


class Piece(NamedTuple):
    """Neighbouring positions that a rank holds, which stand at ``at`` in its local tensor."""

    at: int
    first: int
    size: int


@dataclass(frozen=True)
class Layout:
    """Which positions of a sequence each rank of a mesh holds, and in which order.

    Attributes:
        length: how many positions the sequence has.
        pieces: for each rank, the intervals ``(begin, end)`` of positions that it holds, in
            ascending order. Intervals of all ranks together are the whole sequence.

    Raises:
        TypeError: pieces that are no intervals.
        ValueError: intervals that overlap, leave a gap, or do not ascend.

    Example:
        >>> layout = fastattn.distributed.Layout.zigzag(10, 2, unit=1)
        >>> layout.pieces
        (((0, 3), (9, 10)), ((3, 6), (6, 9)))
        >>> layout.positions(0)  # for rotary embeddings and labels
        tensor([0, 1, 2, 9])
    """

    length: int
    pieces: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        arguments.check_int("length", self.length, 0)
        try:
            bounds = [(a, b) for own in self.pieces for a, b in own]
        except (TypeError, ValueError):
            raise TypeError(
                f"pieces: expected the intervals (begin, end) of each rank, got {self.pieces!r}"
            ) from None
        for a, b in bounds:
            arguments.check_int("pieces", a, 0)
            arguments.check_int("pieces", b, a)
        for own in self.pieces:
            if list(own) != sorted(own):
                raise ValueError(f"pieces: expected ascending intervals on each rank, got {own}")
        every = sorted((a, b) for a, b in bounds if a != b)
        ends = [0, *(b for _, b in every)]
        if [a for a, _ in every] != ends[:-1] or ends[-1] != self.length:
            raise ValueError(
                f"pieces: expected intervals that are all of [0, {self.length}), each position "
                f"once, got {every}"
            )

    @staticmethod
    def contiguous(length: int, ranks: int) -> Layout:
        """One piece a rank, as ``torch.chunk`` cuts: the last ones may be shorter, or empty.

        Raises:
            TypeError: a number is no int.
            ValueError: ``length`` is negative, or there are no ranks.
        """
        _check(length, ranks)
        size = -(-length // ranks)  # _chunks() would leave no rank empty
        ends = [min(n * size, length) for n in range(ranks + 1)]
        return Layout(length, tuple((x,) for x in itertools.pairwise(ends)))

    @staticmethod
    def zigzag(length: int, ranks: int, unit: int = 128) -> Layout:
        """Two chunks a rank, r and 2 ranks - 1 - r, so that causal attention is balanced.

        Args:
            length: how many positions there are.
            ranks: how many ranks.
            unit: chunks begin at multiples of this. Below ``2 * ranks * unit`` positions, some
                chunks are empty, and a smaller unit balances better.

        Raises:
            TypeError: a number is no int.
            ValueError: ``length`` is negative, or there are no ranks, or no unit.
        """
        _check(length, ranks, unit)
        chunks = _chunks(length, 2 * ranks, unit)
        return Layout(length, tuple((chunks[r], chunks[-1 - r]) for r in range(ranks)))

    @staticmethod
    def balanced(
        cost: Sequence[float] | Tensor, ranks: int, blocks: int = 4, unit: int = 128
    ) -> Layout:
        """``blocks`` chunks a rank, so that ranks have similar costs: for packed documents.

        The most costly chunk goes first, to the rank with the least cost that has room.

        Args:
            cost: of each position, ``[length]`` or ``[1, length]``: how many keys its query sees.
                For a mask of intervals, ``mask.kv_len - mask.kv_begin``. For a batch, whose samples
                share the layout, ``(mask.kv_len - mask.kv_begin).sum(0)``.
            ranks: how many ranks.
            blocks: chunks a rank.
            unit: chunks begin at multiples of this.

        Raises:
            TypeError: a number is no int.
            ValueError: costs of several samples, or there are no ranks, blocks, or no unit.
        """
        costs = _costs(cost)
        _check(len(costs), ranks, unit)
        arguments.check_int("blocks", blocks, 1)
        chunks = _chunks(len(costs), ranks * blocks, unit)
        own: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        loads = [0.0] * ranks
        for a, b in sorted(chunks, key=lambda chunk: -_sum(costs, chunk)):
            rank = min((r for r in range(ranks) if len(own[r]) < blocks), key=loads.__getitem__)
            own[rank].append((a, b))
            loads[rank] += _sum(costs, (a, b))
        return Layout(len(costs), tuple(tuple(sorted(x)) for x in own))

    @property
    def ranks(self) -> int:
        """How many ranks share the sequence."""
        return len(self.pieces)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many positions each rank holds."""
        return tuple(constant(sum(b - a for a, b in own)) for own in self.pieces)

    def of(self, rank: int) -> Iterator[Piece]:
        """The pieces of a rank that are not empty."""
        at = 0
        for a, b in self.pieces[rank]:
            if b > a:
                yield Piece(at, constant(a), constant(b - a))
            at += constant(b - a)

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """The positions of a rank's rows, int64 ``[sizes[rank]]``."""
        own = [torch.arange(a, b, device=device) for a, b in self.pieces[rank]]
        return torch.cat(own) if own else torch.zeros(0, dtype=torch.int64, device=device)

    def loads(self, cost: Sequence[float] | Tensor) -> list[float]:
        """The cost of each rank, from that of each position; balance is their max over mean.

        Raises:
            ValueError: another number of costs than positions.
        """
        costs = _costs(cost)
        if len(costs) != self.length:
            raise ValueError(f"cost: expected {self.length} positions, got {len(costs)}")
        return [sum(_sum(costs, piece) for piece in own) for own in self.pieces]

    def take(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """The rank's part of a whole tensor, in memory of its own."""
        parts = [x.narrow(dim, first, size) for _, first, size in self.of(rank)]
        return torch.cat(parts or [x.narrow(dim, 0, 0)], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor, from the parts of all ranks."""
        found = [
            (first, part.narrow(dim, at, size))
            for rank, part in enumerate(parts)
            for at, first, size in self.of(rank)
        ]
        ordered = [x for _, x in sorted(found, key=lambda pair: pair[0])]
        return torch.cat(ordered, dim) if ordered else parts[0]


def _costs(cost: Sequence[float] | Tensor) -> Tensor:
    """[length], on the CPU."""
    costs = torch.as_tensor(cost, dtype=torch.float64).cpu()
    if costs.dim() < 1 or costs.numel() != costs.shape[-1]:
        raise ValueError(
            f"cost: expected [length], got {list(costs.shape)}: write cost.sum(0) of a batch, "
            "whose samples share the layout"
        )
    return costs.flatten()


def constant(n: int) -> int:
    """The number as a constant of compiled calls, which have a graph for each layout.

    int() would keep a symbol.
    """
    return len(range(n))


def _check(length: int, ranks: int, unit: int = 1) -> None:
    arguments.check_int("length", length, 0)
    arguments.check_int("ranks", ranks, 1)
    arguments.check_int("unit", unit, 1)


def _chunks(length: int, count: int, unit: int) -> list[tuple[int, int]]:
    """``count`` intervals of almost equal size, which begin at multiples of ``unit``."""
    units = -(-length // unit)
    ends = [min(-(-n * units // count) * unit, length) for n in range(count + 1)]
    return list(itertools.pairwise(ends))


def _sum(costs: Tensor, piece: tuple[int, int]) -> float:
    return costs[slice(*piece)].sum().item()
