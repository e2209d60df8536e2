"""Makes the plan of a call (prepared.py) by watching one that goes the ordinary way."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from ..tile.launching import watching
from .prepared import ONCE, Empty, Launch, Launcher, Operator, Plan

aten = torch.ops.aten
ALLOCATE = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_permuted.default,
    aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip

APART = 512  # bytes, as PyTorch's allocator has it: no two tensors share a line of a cache
Event = tuple[Empty | Operator | Launch, range]  # and the numbers of the tensors that it makes


class NotUnderstoodError(Exception):
    """Something that no plan can do."""


def watch(launcher: Launcher, args: tuple) -> tuple[tuple[Tensor, ...], Plan | object | None]:
    """(``launcher(*args)``, its plan if there can be one; ONCE if kernels had to be compiled)."""
    # A tensor may be given twice. Another call's need not be: each gets an object of its own.
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    seen = _Watch([x for x in args if isinstance(x, Tensor)])
    watching.watcher, watching.compiled = seen.launch, False
    try:
        with torch.no_grad(), seen:
            results = launcher(*args)
    finally:
        watching.watcher = None
    return results, ONCE if watching.compiled else seen.plan(results)


class _Watch(TorchDispatchMode):
    """Notes what happens. Every tensor that it sees has a number."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self.given = len(tensors)
        self.tensors: list[Tensor] = []  # by number; alive, so that their ids stay theirs
        self.same: list[Tensor] = []  # further names of these
        self.numbers: dict[int, int] = {}
        self.places: list[tuple[int, int]] = []  # whose memory a tensor shares, bytes behind it
        self.events: list[Event] = []
        self.understood = True
        for x in tensors:
            self.add(x, None)

    def add(self, x: Tensor, of: Tensor | None) -> None:
        """Numbers a new tensor, which shares the memory of another one, or has its own."""
        place = len(self.tensors), 0
        if of is not None:
            root, offset = self.places[self.number(of)]
            place = root, offset + _bytes_before(x) - _bytes_before(of)
        self.numbers[id(x)] = len(self.tensors)
        self.tensors.append(x)
        self.places.append(place)

    def number(self, x: Tensor) -> int:
        """The number of a tensor."""
        if id(x) not in self.numbers:
            raise NotUnderstoodError(x)
        return self.numbers[id(x)]

    # ---- operators ----

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        try:
            self.operator(function, args, kwargs or {}, made)
        except NotUnderstoodError:
            self.understood = False
        return made

    def operator(self, function: Any, args: tuple, options: dict[str, Any], made: Any) -> None:
        """Notes a call of an operator."""
        if function is aten.detach.default:  # as empty_like ends with: the same under a new name
            self.same.append(made)
            self.numbers[id(made)] = self.number(args[0])
            return
        first = len(self.tensors)
        taken = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
        holes = [(n, self.number(x)) for n, x in enumerate(args) if isinstance(x, Tensor)]
        named = [(n, self.number(x)) for n, x in options.items() if isinstance(x, Tensor)]
        results = made if isinstance(made, (tuple, list)) else (made,)
        new = [x for x in results if not isinstance(x, Tensor) or id(x) not in self.numbers]
        if len(new) not in (0, len(results)) or not all(isinstance(x, Tensor) for x in new):
            raise NotUnderstoodError(function)
        if any(isinstance(x, (tuple, list)) and _any_tensor(x) for x in args):
            raise NotUnderstoodError(function)
        for x in new:
            shared = (y for y in taken if _memory(x)._cdata == _memory(y)._cdata)
            self.add(x, next(shared, None))
        event: Empty | Operator
        if function in ALLOCATE:
            if made.device != self.tensors[0].device:
                raise NotUnderstoodError(function)
            event = Empty(tuple(made.shape), made.stride(), made.dtype)
        else:
            args = tuple(None if isinstance(x, Tensor) else x for x in args)
            rest = {n: x for n, x in options.items() if not isinstance(x, Tensor)}
            event = Operator(function, args, rest, tuple(holes), tuple(named), len(new))
        self.events.append((event, range(first, len(self.tensors))))

    # ---- launches ----

    def launch(self, kernel: Any, compiled: Any, programs: int, args: tuple, options: dict) -> None:
        """Notes a launch. Whatever a version of Triton lacks is no reason to fail."""
        try:
            bound = dict(zip(kernel.arg_names, args, strict=False)) | options
            kinds = compiled.src.signature
            values = [bound[name] for name in kernel.arg_names]
            flat = list(_leaves(values, [kinds[name] for name in kernel.arg_names]))
            event = self.prepared(compiled, programs, flat)
        except (NotUnderstoodError, AttributeError, LookupError, TypeError, ValueError):
            self.understood = False
        else:
            self.events.append((event, range(0)))

    def prepared(self, compiled: Any, programs: int, args: list) -> Launch:
        """The launch of a kernel with flat arguments."""
        holes = []
        for n, x in enumerate(args):
            if isinstance(x, Tensor):
                holes.append((n, *self.places[self.number(x)]))
                args[n] = 0
        launcher = copy.copy(compiled.run)
        function = launcher.launch
        scratch = launcher.global_scratch_size or launcher.profile_scratch_size
        if function is not driver.active.utils.launch or scratch:
            raise NotUnderstoodError(compiled)
        if len(launcher.kernel_signature) != len(args):
            raise NotUnderstoodError(compiled)
        # The launcher itself says what it gives to Triton's C function, and where the stream is.
        annotate = sys.modules[type(launcher).__module__].annotate_arguments
        launcher.arg_annotations = annotate(["i32"] * len(args))
        stream, calls = object(), []
        launcher.launch = lambda *given: calls.append(given)
        about = compiled.function, compiled.packed_metadata
        launcher(programs, 1, 1, stream, *about, None, None, None, *args)
        [(*given, last)] = calls
        at = given.index(stream)
        if list(last) != args:
            raise NotUnderstoodError(compiled)
        before, behind = tuple(given[:at]), tuple(given[at + 1 :])
        return Launch(function, before, behind, args, tuple(holes), compiled)

    # ---- the plan ----

    def plan(self, results: tuple[Tensor, ...]) -> Plan | None:
        """The plan of what was noted, if all of it was understood."""
        if not self.understood or any(id(x) not in self.numbers for x in results):
            return None
        wanted = [self.number(x) for x in results]
        events = self.needed({*wanted})
        steps = [event for event, _ in events if not isinstance(event, Empty)]
        operators = [x for x in steps if isinstance(x, Operator)]
        whole = {*wanted, *(n for x in operators for _, n in (*x.holes, *x.named))}
        empties, places = self.allocations(events, whole)
        count = self.given + len(empties)
        for event, made in events:
            if isinstance(event, Operator):
                places |= {n: (count + at, 0) for at, n in enumerate(made)}
                count += len(made)
        placed = tuple(_placed(event, places) for event in steps)
        return Plan(tuple(empties), placed, tuple(places[n][0] for n in wanted))

    def allocations(
        self, events: list[Event], whole: set[int]
    ) -> tuple[list[Empty], dict[int, tuple[int, int]]]:
        """(what to allocate, where tensors are: in which one, bytes from its beginning).

        Those that are not ``whole`` are seen by kernels alone, and share one allocation.
        """
        empties: list[Empty] = []
        places = {n: (n, 0) for n in range(self.given)}
        shared, room = {}, 0
        for event, made in events:
            if not isinstance(event, Empty):
                continue
            size = _memory(self.tensors[made.start]).nbytes()
            if made.start in whole or size == 0:
                places[made.start] = self.given + len(empties), 0
                empties.append(event)
            else:
                shared[made.start] = room
                room += -(-size // APART) * APART
        if shared:
            workspace = self.given + len(empties)
            places |= {n: (workspace, offset) for n, offset in shared.items()}
            empties.append(Empty((room,), (1,), torch.uint8))
        return empties, places

    def needed(self, wanted: set[int]) -> list[Event]:
        """The events that these tensors, or a launch, depend on."""
        events = []
        for event, made in reversed(self.events):
            if isinstance(event, Launch):
                wanted |= {n for _, n, _ in event.holes}
            elif not wanted.intersection(made) and not _changes_something(event):
                continue
            elif isinstance(event, Operator):
                wanted |= {n for _, n in (*event.holes, *event.named)}
            events.append((event, made))
        return events[::-1]


def _memory(x: Tensor) -> torch.UntypedStorage:
    return x.untyped_storage()


def _bytes_before(x: Tensor) -> int:
    return x.storage_offset() * x.element_size()


def _any_tensor(x: Any) -> bool:
    return any(isinstance(y, Tensor) for y in x)


def _changes_something(event: Empty | Operator) -> bool:
    return isinstance(event, Operator) and event.function._schema.is_mutable


def _leaves(values: Any, kinds: Any) -> Iterator[Any]:
    """What a kernel gets of nested arguments; constants are compiled into it."""
    for value, kind in zip(values, kinds, strict=True):
        if isinstance(kind, tuple):
            yield from _leaves(value, kind)
        elif kind != "constexpr":
            yield value.value if isinstance(value, tl.constexpr) else value


def _placed(step: Operator | Launch, places: dict[int, tuple[int, int]]) -> Operator | Launch:
    """A step of a plan, in which tensors have other numbers."""
    if isinstance(step, Launch):
        holes = []
        for place, n, offset in step.holes:
            at, start = places[n]
            holes.append((place, at, start + offset))
        return step._replace(holes=tuple(holes))
    return step._replace(
        holes=tuple((place, places[n][0]) for place, n in step.holes),
        named=tuple((name, places[n][0]) for name, n in step.named),
    )
