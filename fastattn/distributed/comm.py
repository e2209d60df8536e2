"""What ranks send each other: functional collectives, which compilers trace, and their bytes.

Every function here must be called by all ranks of a group, in the same order. Sizes may differ by
rank, and are known to all ranks from a layout.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.distributed_c10d import _get_object_coll_device

from fastattn.distributed.layout import Layout


class Group:
    """The ranks that share a sequence: a 1-D mesh, or a process group.

    Raises:
        TypeError: neither of these.
        ValueError: a mesh of more dims, or one without this process.
        RuntimeError: torch.distributed has no process group yet.
    """

    def __init__(self, mesh: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group() first, under "
                "torchrun"
            )
        given, absent = mesh, dist.GroupMember.NON_GROUP_MEMBER  # what new_group() gives others
        if isinstance(mesh, dist.device_mesh.DeviceMesh):
            if mesh.ndim != 1:
                raise ValueError(
                    f"mesh: expected one dim, got {mesh.ndim}: write mesh['name'] of a dim"
                )
            given = absent if mesh.get_coordinate() is None else mesh.get_group()
        if isinstance(given, int) and given == absent:
            raise ValueError(
                f"mesh: rank {dist.get_rank()} is not in the mesh: call this on its ranks alone"
            )
        if not isinstance(given, dist.ProcessGroup):
            raise TypeError(
                f"mesh: expected a DeviceMesh or a ProcessGroup, got {type(mesh).__name__}"
            )
        self.group = given
        self.rank, self.size = dist.get_rank(given), dist.get_world_size(given)


# ---- bytes ----


class Sent:
    """How many bytes this rank has sent to others."""

    bytes: int = 0


_counting: list[Sent] = []


@contextlib.contextmanager
def count_bytes() -> Iterator[Sent]:
    """Counts the bytes that this process sends inside the context.

    The context manager gives an object whose ``bytes`` is an int. Small numbers such as lengths and
    seeds are not counted. Compiled calls count only what "gather" and "ring" send.

    Example:
        >>> with fastattn.distributed.count_bytes() as sent:
        ...     out = context_parallel_attention(own, own, own, group)
        >>> sent.bytes
    """
    sent = Sent()
    _counting.append(sent)
    try:
        yield sent
    finally:
        _counting.remove(sent)


def _count(x: Tensor, elements: int) -> None:
    if torch.compiler.is_compiling():
        return  # a compiled call would do so once, or be traced again
    for sent in _counting:
        sent.bytes += elements * x.element_size()


# ---- collectives ----


Shapes = Sequence[Sequence[int]]


def exchange(parts: Sequence[Tensor], shapes: Shapes, group: Group) -> list[Tensor]:
    """All-to-all: ``parts[r]`` goes to rank r, and a tensor of ``shapes[r]`` comes from rank r."""
    return exchange_later(parts, shapes, group)()


def exchange_later(
    parts: Sequence[Tensor], shapes: Shapes, group: Group
) -> Callable[[], list[Tensor]]:
    """The same: a function that waits for what is on its way."""
    sizes = [part.numel() for part in parts]
    coming = [math.prod(shape) for shape in shapes]
    flat = torch.cat([part.reshape(-1) for part in parts])
    _count(flat, flat.numel() - sizes[group.rank])
    into = _begun(collectives.all_to_all_single(flat, coming, sizes, group.group), flat)

    def ready() -> list[Tensor]:
        pieces = wait(into).split(coming)
        return [x.view(tuple(shape)) for x, shape in zip(pieces, shapes, strict=True)]

    return ready


def gather(x: Tensor, dim: int, layout: Layout, group: Group) -> Callable[[], Tensor]:
    """The whole, in the order of positions: a function that waits for it. It is on its way."""
    most = max(layout.sizes)
    shape = list(x.shape)
    shape[dim] = most
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    _count(padded, padded.numel() * (group.size - 1))
    coming = _all_gather(padded, group)

    def ready() -> Tensor:
        every = wait(coming).view(group.size, *shape)
        return layout.join(
            [every[rank].narrow(dim, 0, size) for rank, size in enumerate(layout.sizes)], dim
        )

    return ready


def _all_gather(x: Tensor, group: Group) -> Tensor:
    """[ranks * first dim, ...]; torch 2.13 has another name for what 2.11 has."""
    name = "all_gather_single" if hasattr(collectives, "all_gather_single") else "all_gather_tensor"
    return _begun(getattr(collectives, name)(x.reshape(-1), 0, group.group), x)


def gather_rows(x: Tensor, layout: Layout, group: Group, dim: int = 2) -> Tensor:
    """The whole, in the order of positions."""
    return gather(x, dim, layout, group)()


def scatter_sum(x: Tensor, layout: Layout, group: Group) -> Tensor:
    """This rank's positions, dim 2, of the sum over ranks, added up in the order of ranks."""
    parts = [layout.take(x, 2, rank) for rank in range(group.size)]
    shape = parts[group.rank].shape
    return torch.stack(exchange(parts, [shape] * group.size, group)).sum(0)


def total(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, on every rank."""
    _count(x, x.numel() * 2 * (group.size - 1) // group.size)
    return wait(collectives.all_reduce(x.contiguous(), "sum", group.group))


def lengths(own: Sequence[int], group: Group) -> list[list[int]]:
    """The numbers of every rank, on every host: waits for the group's device."""
    device = _get_object_coll_device(group.group)
    numbers = torch.tensor(own, dtype=torch.int64, device=device)
    return wait(_all_gather(numbers, group)).view(group.size, -1).tolist()


def first(x: Tensor, group: Group) -> Tensor:
    """The tensor of the group's first rank."""
    return wait(collectives.broadcast(x, 0, group.group))


def seed(device: torch.device, groups: Sequence[Group]) -> Tensor:
    """One seed for all ranks of groups that cross: the one that the first rank draws."""
    drawn = torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)
    for group in groups:
        drawn = first(drawn, group)
    return drawn


def _begun(coming: Tensor, sent: Tensor) -> Tensor:
    """What is on its way; on a CPU, what is there.

    gloo's two threads share a string, the name of the collective that ended last, without a lock.
    With torch 2.13 they free its memory twice when two collectives of a group end at once.
    """
    return wait(coming) if sent.device.type == "cpu" else coming


def wait(x: Tensor) -> Tensor:
    """A plain tensor: what a collective returns must not reach other code before it is there."""
    return x.wait() if isinstance(x, collectives.AsyncCollectiveTensor) else x
