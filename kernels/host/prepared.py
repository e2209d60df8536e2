"""Prepared launches: a plan of what a call does on the host, for calls that repeat.

What a launcher does depends on its tensors' shapes, strides and dtypes, and on their pointers
modulo 16. It does not depend on their data. The same holds for the kernels that Triton chooses. A
call that comes again is watched once (watched.py): what it allocates, which operators of PyTorch it
calls, which kernels it launches with which arguments. That is its plan. Later calls allocate, fill
the plan's holes with pointers, and launch.

    first     the ordinary way: a decoder's sizes may never come again
    second    the ordinary way, watched
    later     the plan

A plan is made only if every step of the call is understood. Other calls go the ordinary way. So do
all calls while Triton's launch hooks are set, and with FASTATTN_PLANS=0. A plan keeps no tensor.

Plans need Triton 3.7, and have not run on a GPU: in the tests a stand-in takes the driver's place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from fastattn.problem import schemas

from . import tuned
from .launch import precision

Launcher = Callable[..., tuple[Tensor, ...]]
ALIGNMENT = 16  # bytes; Triton specialises for pointers that are multiples
MOST = 512  # descriptions that are kept
WANTED = os.environ.get("FASTATTN_PLANS") != "0"
# Of an operator's arguments, these are no tensors.
FIRST_NUMBER, LAST_NUMBER = schemas.Call._fields.index("band_lo"), len(schemas.Call._fields)


class Empty(NamedTuple):
    """A tensor to allocate."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Operator(NamedTuple):
    """A call of an operator of PyTorch's."""

    function: Callable
    args: tuple
    options: dict[str, Any]
    holes: tuple[tuple[int, int], ...]  # (position, tensor)
    named: tuple[tuple[str, int], ...]  # (keyword, tensor)
    makes: int  # new tensors

    def run(self, tensors: list, pointers: list[int], stream: int) -> None:
        """Appends what it makes to both lists."""
        args, options = list(self.args), dict(self.options)
        for place, n in self.holes:
            args[place] = tensors[n]
        for name, n in self.named:
            options[name] = tensors[n]
        made = self.function(*args, **options)
        if self.makes:
            new = (made,) if isinstance(made, Tensor) else made
            tensors += new
            pointers += [x.data_ptr() for x in new]


class Launch(NamedTuple):
    """A launch of a kernel by Triton's C function."""

    function: Callable
    before: tuple  # of its arguments, those before the stream
    behind: tuple  # and those between the stream and the kernel's
    args: list  # the kernel's, flat
    holes: tuple[tuple[int, int, int], ...]  # (position, tensor, bytes behind its first element)
    kernel: Any  # whose machine code must stay loaded

    def run(self, tensors: list, pointers: list[int], stream: int) -> None:
        """Launches, with pointers in the holes."""
        args = self.args.copy()
        for place, n, offset in self.holes:
            args[place] = pointers[n] + offset
        self.function(*self.before, stream, *self.behind, args)


class Plan(NamedTuple):
    """What a call does. Tensors have numbers: its own, then empty ones, then operators' results."""

    empties: tuple[Empty, ...]
    steps: tuple[Operator | Launch, ...]
    results: tuple[int, ...]

    def run(self, tensors: list, pointers: list[int], device: torch.device) -> tuple[Tensor, ...]:
        """The results of a call with these tensors, whose data is at ``pointers``."""
        for size, stride, dtype in self.empties:
            x = torch.empty_strided(size, stride, dtype=dtype, device=device)
            tensors.append(x)
            pointers.append(x.data_ptr())
        stream = driver.active.get_current_stream(device.index)
        for step in self.steps:
            step.run(tensors, pointers, stream)
        return tuple([tensors[n] for n in self.results])


# By description: a plan; ONCE for what was seen once; None for what no plan can do.
ONCE = object()
_known: dict[tuple, Any] = {}


def run(launcher: Launcher, args: tuple) -> tuple[Tensor, ...]:
    """``launcher(*args)``. The first argument is a tensor, on the current device."""
    device = args[0].device
    if not possible(device) or observed():
        return launcher(*args)
    description, tensors, pointers = describe(launcher, args)
    plan = _known.get(description, launcher)
    if type(plan) is Plan:
        return plan.run(tensors, pointers, device)
    if plan is ONCE:
        from .watched import watch

        results, _known[description] = watch(launcher, args)
        return results
    if plan is launcher:
        if len(_known) >= MOST:
            _known.pop(next(iter([*_known]), None), None)  # other threads may change it
        _known[description] = ONCE
    return launcher(*args)


def possible(device: torch.device) -> bool:
    """Whether plans may be made for a device: Triton for AMD specialises for more than we know."""
    return WANTED and device.type == "cuda" and torch.version.hip is None


def observed() -> bool:
    """Whether somebody watches launches, or changes how kernels are compiled."""
    hooks, compiling = triton.knobs.runtime, vars(triton.knobs.compilation)
    return bool(
        getattr(hooks.launch_enter_hook, "calls", True)
        or getattr(hooks.launch_exit_hook, "calls", True)
        or hooks.debug
        or getattr(hooks, "add_stages_inspection_hook", None)
        or compiling.get("instrumentation_mode")
    )


def describe(launcher: Launcher, args: tuple) -> tuple[tuple, list[Tensor], list[int]]:
    """(all that a plan depends on, the tensors among ``args``, the addresses of their data)."""
    numbers = args[FIRST_NUMBER:LAST_NUMBER]
    found: list[Any] = [launcher, tuned.generation(), precision(args[0].dtype), numbers]
    tensors, pointers = [], []
    for x in (*args[:FIRST_NUMBER], *args[LAST_NUMBER:]):
        if isinstance(x, Tensor):
            pointer = x.data_ptr()
            found.append((x.shape, x.stride(), x.dtype, x.device, pointer % ALIGNMENT))
            tensors.append(x)
            pointers.append(pointer)
        else:
            found.append(x)
    return tuple(found), tensors, pointers
